"""The header of a report: what is known when a run begins."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..report import values
from . import environment, targets
from .targets import Target

if TYPE_CHECKING:
    from .run import Run


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
    )


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
        *(f"target: {target.name}, {target.probe['name']}{_lacking(target.probe)}" for target in run.targets),
    ]


def _lacking(probe: Mapping[str, Any]) -> str:
    return f", which declares that it lacks {', '.join(probe['lacks'])}" if probe["lacks"] else ""
