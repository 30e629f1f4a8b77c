"""The header of a report: what is known when a run begins."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..oracles.policy import declared, overloads, surface
from ..report import reach, values
from . import environment, options, targets
from .endings import Untestable
from .replacements import replaced_functions
from .targets import Target
from .torch_backends import torch_backends

if TYPE_CHECKING:
    from .run import Run


_POLICY = "cast"  # the chapter that judges the op policy: to read it takes half of the time of a single contract


def now() -> str:
    """Return the time in UTC, to the second, in the form of ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def header(run: Run) -> values.Header:
    """Return the header of the report of `run`."""
    used = [chapter for chapter in run.catalogue.chapters if chapter.name in run.chapters]
    return values.Header(
        suite=environment.suite(),
        started=now(),
        environment=environment.environment(),
        flags=environment.flags(),
        variables=environment.variables(),
        targets=tuple(_target(run, target) for target in run.targets),
        options=_options(run),
        chapters=tuple(values.Chapter(chapter.name, chapter.title, chapter.summary) for chapter in used),
        contracts=tuple(contract.stated() for contract in run.contracts.values()),
        not_judged=targets.not_judged(run.targets),
        op_policy=op_policy(run.targets) if _POLICY in run.chapters else None,
        autocast_kernels=run.autocast_kernels,
        replaced_functions={origin: tuple(names) for origin, names in replaced_functions().items()},
        torch_backends=torch_backends(),
        not_in_force={
            id: contract.bounds
            for id, contract in options.select(run.catalogue, run.options).items()
            if id not in run.contracts
        },
    )


def op_policy(run_targets: Iterable[Target]) -> Mapping[str, values.OpPolicy] | None:
    """Return the autocast rules of the targets' backends; None where this torch does not tell them.

    Contracts of the chapter cast judge the rules, and fail where the dispatcher lacks what it takes to read them.
    """
    backends = dict.fromkeys(target.device_type for target in run_targets if _has_policy(target.device_type))
    try:
        with _without_deprecations():
            found = {backend: surface.rules(targets.resolve, backend) for backend in backends}
    except (AttributeError, RuntimeError, TypeError, Untestable):  # a TypeError: the device lacks tensors of a dtype
        return None
    return {
        backend: values.OpPolicy(
            rules["key"],
            rules["amp_dtype"],
            {policy: tuple(names) for policy, names in rules["overloads"].items()},
            rules["not_in_force"],
        )
        for backend, rules in found.items()
    }


def _has_policy(device_type: str) -> bool:
    return declared.followed(device_type) in overloads.BACKENDS


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Keep warnings about deprecated ops from the user, also those that torch writes to standard error by itself."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _target(run: Run, target: Target) -> values.Target:
    return values.Target(
        slot=run.slot(target),
        name=target.name,
        device_type=target.device_type,
        fake=target.is_fake,
        probe=dict(target.probe),
    )


def _options(run: Run) -> values.Options:
    asked = run.options
    return values.Options(
        level=asked.level,
        amp_dtype=asked.amp_dtypes[0] if len(asked.amp_dtypes) == 1 else "both",
        seed=asked.seed,
        no_waivers=asked.no_waivers,
        require_conclusive=asked.require_conclusive,
        chapters=asked.chapters,
        contracts=asked.contracts,
        devices=asked.devices,
        gpu=asked.gpu,
        waivers=tuple(path.name for path in asked.waivers),
        workers=run.surroundings.workers,
        selection=run.surroundings.selection,
        op_policies={device_type: str(said) for device_type, said in run.op_policies.items()},
        imports=asked.imports,
        labels=dict(asked.labels),
    )


def machine(run: Run) -> dict[str, Any]:
    """Describe the software and the real devices of `run` as pytest-benchmark stores them with its times."""
    described = {name: value for name, value in vars(environment.environment()).items() if name != "packages"}
    real = [target for target in run.targets if not target.is_fake]
    devices = [{"target": target.name, **target.probe, **targets.clocks(target)} for target in real]
    return {**described, "targets": devices}


def heading(run: Run) -> list[str]:
    """Return the lines above the run: what is judged, and on what."""
    asked = run.options
    return [
        f"conformance: {len(run.contracts)} contracts, level {asked.level}, {', '.join(asked.amp_dtypes)}, "
        f"seed {asked.seed}, torch {torch.__version__}",
        *(f"target: {_described(run, target)}" for target in run.targets),
        *reach.overridden(run.autocast_kernels, frozenset(targets.FAKE_DEVICE_TYPES)),
        *reach.replaced(replaced_functions()),
        *_unjudged(run),
    ]


def _described(run: Run, target: Target) -> str:
    like = run.op_policies.get(target.device_type)
    lists = f", judged by the op lists of {like}" if like else ""
    return f"{target.name}, {target.probe['name']}{lists}{_lacking(target.probe)}"


def _unjudged(run: Run) -> Iterator[str]:
    judged = any(not target.is_fake and target.device_type != "cpu" for target in run.targets)
    others = targets.not_judged(run.targets)
    driver = environment.driver() if not others and not judged else None
    return reach.unjudged(others, judged, driver, str(torch.__version__))


def _lacking(probe: Mapping[str, Any]) -> str:
    return f", which declares that it lacks {', '.join(probe['lacks'])}" if probe["lacks"] else ""
