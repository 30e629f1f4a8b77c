"""Attention on each kernel that takes the same inputs, so that a failure of one is told from a failure of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ...harness.check import Case
from ...harness.targets import Target
from .attention_kernels import attempts

T = TypeVar("T")


def by_kernel(case: Case, target: Target, rng: torch.Generator, measure: Callable[[], T]) -> dict[str, T]:
    """Return what `measure` finds on each kernel, the one that torch chooses first, from the same random numbers.

    Fails the case where a kernel that takes the inputs raises and another does not; what all raise goes on.
    """
    drawn = rng.get_state()

    def again() -> T:
        rng.set_state(drawn)
        return measure()

    tried = list(attempts(again, target.device_type))
    found = {one.kernel: one.found for one in tried if one.found is not None}
    raised = {one.kernel: one.raised for one in tried if one.raised is not None}
    if (error := next(iter(raised.values()), None)) is not None and not found:
        raise error
    chosen, *others = tried
    ran = [one.kernel for one in others if one.found is not None]
    case.note("attention kernel that torch chooses", chosen.kernel)
    case.note("others that take the inputs as well", ran)
    wrong = {name: f"{type(error).__name__}: {error}" for name, error in raised.items()}
    case.equal("attention kernels that raise on inputs that they take", wrong, {})
    case.true("an attention kernel takes the inputs", bool(found))
    return found


def compare(case: Case, what: str, figures: Mapping[str, float], unit: str = "") -> None:
    """Record one figure of every kernel, before any is judged."""
    case.note(f"{what}, by kernel", {name: float(figure) for name, figure in figures.items()}, unit)
