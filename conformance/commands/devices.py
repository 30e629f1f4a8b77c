"""Devices that a command works on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..harness import requirements
from .console import UsageError


def real_target(name: str) -> Any:
    """The real device that the user named; raises UsageError."""
    if (problem := requirements.torch_problem()) is not None:
        raise UsageError(problem)
    from ..harness import targets

    try:
        target = targets.resolve(name)
    except targets.TargetError as error:
        raise UsageError(str(error)) from None
    if target.is_fake:
        raise UsageError(f"{name} computes nothing; name a real device")
    return target


def foreign_target(name: str, modules: Iterable[str]) -> Any:
    """A third party's device, once the modules are imported that register it; raises UsageError."""
    if (problem := requirements.torch_problem()) is not None:
        raise UsageError(problem)
    from ..harness import backends, targets

    try:
        backends.import_first(modules, Path.cwd())
    except backends.BackendError as error:
        raise UsageError(str(error)) from None
    target = real_target(name)
    if not targets.is_foreign(target.device_type):
        raise UsageError(f"--device: the rules of {target.device_type} are in the surface of torch; leave it out")
    return target


def first_device() -> str:
    if (problem := requirements.torch_problem()) is not None:
        raise UsageError(problem)
    from ..harness import targets

    return targets.accelerator() or "cpu"
