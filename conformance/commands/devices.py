"""Devices that a command works on."""

from __future__ import annotations

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


def first_device() -> str:
    if (problem := requirements.torch_problem()) is not None:
        raise UsageError(problem)
    from ..harness import targets

    return targets.accelerator() or "cpu"
