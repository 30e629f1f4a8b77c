"""One run: its options, contracts and targets, what was collected, and the records of its cases."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..measure.health import Watch
from ..oracles.policy import kernels
from ..oracles.policy.declaration import Declaration
from ..oracles.policy.declared import followed
from ..report import decode, document, values
from ..workloads import user_workload
from . import environment, lost_device, targets, waivers
from .catalogue import Catalogue, Contract
from .check import DEPTHS
from .expectations import Expectations
from .measuring import Deadlines
from .options import Options
from .targets import Target
from .time_limit import LIMITS, TimeLimit
from .waivers import Waiver


@dataclass(frozen=True)
class Surroundings:
    """What pytest says of the session: the folder it was started in, what narrowed it, and its number of workers."""

    here: Path
    selection: str | None
    workers: int


def limit_of(options: Options) -> float:
    """Return the seconds that the judgement of the user's workload may take."""
    return LIMITS[options.level] if options.time_limit is None else options.time_limit


class Run:
    """The state of one run; nothing of it outlives the pytest session."""

    def __init__(
        self,
        options: Options,
        catalogue: Catalogue,
        contracts: dict[str, Contract],
        run_targets: tuple[Target, ...],
        op_policies: Mapping[str, Declaration],
        known_failures: tuple[Waiver, ...],
        baseline: tuple[document.Report, str] | None,
        accepted: tuple[values.AcceptedChange, ...],
        own: user_workload.Builder | None,
        expectations: Expectations,
        surroundings: Surroundings,
    ) -> None:
        self.options = options
        self.catalogue = catalogue
        self.contracts = contracts
        self.chapters = {contract.chapter for contract in contracts.values()}
        self.targets = run_targets
        self.op_policies = op_policies
        self.waivers = known_failures
        self.baseline = baseline
        self.accepted = accepted
        self.own = own
        self.expectations = expectations
        self.surroundings = surroundings
        self.depth = DEPTHS.index(options.level)
        self.deadlines = Deadlines(options.level)
        self.time_limit = TimeLimit(limit_of(options))
        self.accelerators = lost_device.watched(run_targets)
        # What was collected.
        self.reasons: dict[str, str] = {}  # contracts that have no case, each with the reason
        self.not_applicable: dict[str, str] = {}  # cases that this machine cannot have, each with the reason
        self.nothing_to_try: dict[str, set[str]] = {}  # by real target, contracts of which no check has a case there
        self.left_to_the_controller: set[str] = set()  # modules with cases that no worker runs
        self.collected: list[tuple[str, str, str]] = []  # contract, case and target
        self.shallow: set[str] = set()  # contracts of which the level leaves out cases
        self.scheduled: set[str] = set()  # the cases that are to leave a record
        self.sought: frozenset[str] | None = None  # while the self-check collects: the contracts of its faults
        # What became of it.
        self.self_check: values.SelfCheck | None = None
        self.cases: list[values.Case] = []
        self.problems: list[str] = []
        self.watches: list[Watch] = []
        self.stopped = False  # before its end, by an option such as -x
        self.interrupted = False  # by SIGTERM, also where something swallowed the exception
        self.broken = False
        self.interrupted_at_its_end = False
        self.ending = False  # all cases have ended, and the report is being written and shown
        self.status: int | None = None  # the exit status, as soon as the report is written
        self.smoke_failed = False
        self.device_lost = False
        self.started = time.monotonic()

    # Targets and dtypes, as the checks are parametrised over them.

    def targets_for(self, kinds: tuple[str, ...]) -> list[Target]:
        """Return the run's targets that a check for `kinds` runs on."""
        return [
            target
            for target in self.targets
            if any(_fits(target, kind) for kind in kinds) or _is_like(followed(target.device_type), target, kinds)
        ]

    def note_nothing_to_try(self, contract: str, kinds: tuple[str, ...]) -> None:
        """Note on which third party's devices a check of autocast in general, for `kinds`, has nothing to try.

        Such a check names the CPU and accelerators of torch's own autocast.
        """
        named = {kind.removeprefix("fake:").removeprefix("torch.") for kind in kinds} - {"real", "accelerator", "fake"}
        if "cpu" in named and len(named) > 1:
            for target in self.targets:
                if followed(target.device_type) not in (*named, *targets.FAKE_DEVICE_TYPES):
                    self.nothing_to_try.setdefault(target.name, set()).add(contract)

    @functools.cached_property
    def autocast_kernels(self) -> dict[str, dict[str, int]]:
        """By device type of the targets, the files outside of torch whose autocast kernels are in force there."""
        found: dict[str, dict[str, int]] = {}
        for device_type in dict.fromkeys(target.device_type for target in self.targets):
            with contextlib.suppress(AttributeError, RuntimeError):  # a torch that does not tell
                if sources := kernels.foreign_sources(device_type):
                    found[device_type] = {environment.redact(file): count for file, count in sources.items()}
        return found

    def without_policy(self) -> str:
        """Say of which devices no op policy is known or declared; empty where there is one for each."""
        types = {target.device_type for target in self.targets}
        unknown = sorted(kind for kind in types if targets.is_foreign(followed(kind)))
        declare = "declare it, as with --op-policy like:cuda"
        return f", as no op policy of {', '.join(unknown)} is known: {declare}" if unknown else ""

    def dtypes_for(self, names: tuple[str, ...]) -> list[str]:
        """Return the amp dtypes among `names` that the run is to judge."""
        return [name for name in names if name in self.options.amp_dtypes]

    def amp_dtype(self, name: str) -> torch.dtype:
        return targets.AMP_DTYPES[name]

    def slot(self, target: Target) -> str:
        """Name the target's place in a case id: the same for every first real device of any machine."""
        if target.is_fake:
            return f"fake-{target.device_type}"
        place = [other for other in self.targets if not other.is_fake].index(target)
        return "device" if place == 0 else f"device{place + 1}"

    def target_names(self) -> str:
        return ", ".join(target.name for target in self.targets)

    def describe(self, parameters: Mapping[str, Any], own: bool) -> dict[str, Any]:
        """Turn the parameters of a case into short names; the target has a field of its own.

        `own` says whether the case is about the user's workload, which is then named.
        """
        short = {
            name: targets.DTYPE_NAMES.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in parameters.items()
            if name != "target"
        }
        return {**short, "workload": self.options.workload} if own else short

    # The way of the data.

    def add(self, record: dict[str, Any]) -> None:
        """Take the record (of encode.encode_case) of a case that has ended."""
        self.cases.append(decode.decode(values.Case, record))

    def lost(self) -> str | None:
        """Say which of the run's devices no longer works, or None."""
        return lost_device.lost(self.accelerators)

    def lose(self, problem: str) -> None:
        """Note that a device died, after which nothing can be judged."""
        if not self.device_lost:
            self.problems.append(f"{problem}; nothing else was run")
        self.device_lost = True

    def broke(self, problem: str) -> None:
        """Note that the suite itself failed."""
        self.problems.append(environment.redact(problem))
        self.broken = True

    def collection(self) -> dict[str, Any]:
        """Return what was collected, for another process."""
        return {
            "reasons": self.reasons,
            "not_applicable": self.not_applicable,
            "nothing_to_try": {name: sorted(ids) for name, ids in self.nothing_to_try.items()},
            "left_to_the_controller": sorted(self.left_to_the_controller),
            "collected": [list(row) for row in self.collected],
            "shallow": sorted(self.shallow),
            "scheduled": sorted(self.scheduled),
        }

    def merge(self, collection: dict[str, Any]) -> None:
        """Take over what an xdist worker collected; every worker collects the same, before this process does."""
        self.reasons = collection["reasons"]
        self.not_applicable = collection["not_applicable"]
        self.nothing_to_try = {name: set(ids) for name, ids in collection["nothing_to_try"].items()}
        self.left_to_the_controller = set(collection["left_to_the_controller"])
        self.collected = [(row[0], row[1], row[2]) for row in collection["collected"]]
        self.shallow = set(collection["shallow"])
        self.scheduled = set(collection["scheduled"])

    def applies(self, waiver: Waiver, target: str) -> bool:
        """Whether the conditions of a waiver hold on a target of the run.

        A device that declares the op policy of another backend has what fake tensors of that backend show: departures
        of the parts of torch that stand above a backend's kernels. A device without kernels of its own has what those
        of torch show that run in their place.
        """
        if waiver.build and getattr(torch.version, waiver.build) is None:
            return False
        if waiver.cpu and torch.backends.cpu.get_cpu_capability() != waiver.cpu:
            return False
        if waiver.about_kernels_of(torch.__version__, target.split(":")[0]):
            return True
        like = self.op_policies.get(target.split(":")[0])
        names = (target, f"fake:{like.backend}") if like else (target,)
        return any(waiver.in_conditions(torch.__version__, name) for name in names)

    def waivers_for(self, contract: str, case: str, target: str) -> tuple[Waiver, ...]:
        """Return the waivers in force that name this case."""
        today = waivers.today()
        return tuple(
            waiver
            for waiver in self.waivers
            if waiver.names(contract, case) and self.applies(waiver, target) and not waiver.expired(today)
        )


def _is_like(backend: str, target: Target, kinds: tuple[str, ...]) -> bool:
    """Whether a check is about the op policy that a third party's device declares, and not about the backend alone."""
    return not target.is_fake and backend != target.device_type and backend in kinds and len(kinds) > 1


def _fits(target: Target, kind: str) -> bool:
    if target.is_fake:
        return kind in ("fake", target.name)
    if kind in ("real", target.device_type, f"torch.{target.device_type}"):
        return True
    return kind == "accelerator" and target.device_type != "cpu"
