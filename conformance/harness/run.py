"""One run: its options, contracts and targets, what was collected, and the records of its cases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..measure.health import Watch
from ..report import decode, document, values
from ..workloads import user_workload
from . import environment, lost_device, targets, waivers
from .catalogue import Catalogue, Contract
from .check import DEPTHS
from .expectations import Expectations
from .measuring import Deadlines
from .options import Options
from .targets import Target
from .waivers import Waiver


@dataclass(frozen=True)
class Surroundings:
    """What pytest says of the session: the folder it was started in, what narrowed it, and its number of workers."""

    here: Path
    selection: str | None
    workers: int


class Run:
    """The state of one run; nothing of it outlives the pytest session."""

    def __init__(
        self,
        options: Options,
        catalogue: Catalogue,
        contracts: dict[str, Contract],
        run_targets: tuple[Target, ...],
        known_failures: tuple[Waiver, ...],
        baseline: document.Report | None,
        own: user_workload.Builder | None,
        expectations: Expectations,
        surroundings: Surroundings,
    ) -> None:
        self.options = options
        self.catalogue = catalogue
        self.contracts = contracts
        self.chapters = {contract.chapter for contract in contracts.values()}
        self.targets = run_targets
        self.waivers = known_failures
        self.baseline = baseline
        self.own = own
        self.expectations = expectations
        self.surroundings = surroundings
        self.depth = DEPTHS.index(options.level)
        self.deadlines = Deadlines(options.level)
        self.accelerators = lost_device.watched(run_targets)
        # What was collected.
        self.reasons: dict[str, str] = {}  # contracts that have no case, each with the reason
        self.not_applicable: dict[str, str] = {}  # cases that this machine cannot have, each with the reason
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
        self.smoke_failed = False
        self.device_lost = False
        self.started = time.monotonic()

    # Targets and dtypes, as the checks are parametrised over them.

    def targets_for(self, kinds: tuple[str, ...]) -> list[Target]:
        """Return the run's targets that a check for `kinds` runs on."""
        return [target for target in self.targets if any(_fits(target, kind) for kind in kinds)]

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
            "left_to_the_controller": sorted(self.left_to_the_controller),
            "collected": [list(row) for row in self.collected],
            "shallow": sorted(self.shallow),
            "scheduled": sorted(self.scheduled),
        }

    def merge(self, collection: dict[str, Any]) -> None:
        """Take over what an xdist worker collected; every worker collects the same, before this process does."""
        self.reasons = collection["reasons"]
        self.not_applicable = collection["not_applicable"]
        self.left_to_the_controller = set(collection["left_to_the_controller"])
        self.collected = [(row[0], row[1], row[2]) for row in collection["collected"]]
        self.shallow = set(collection["shallow"])
        self.scheduled = set(collection["scheduled"])

    def waiver_for(self, contract: str, case: str, target: str) -> Waiver | None:
        """Return the waiver in force that names this case."""
        today = waivers.today()
        for waiver in self.waivers:
            if waiver.names(contract, case) and waiver.in_conditions(torch.__version__, target):
                return None if waiver.expired(today) else waiver
        return None


def _fits(target: Target, kind: str) -> bool:
    if target.is_fake:
        return kind in ("fake", target.name)
    return kind in ("real", target.device_type) or (kind == "accelerator" and target.device_type != "cpu")
