"""Helpers of the recipe checks: comparison of weights, the dtypes of a check, how a recipe runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...measure.generators import seed_torch
from ...measure.precision import repeatable_convolutions
from ...workloads.recipes import Draw, Precision, Recipe, Step


def same_weights(case: Case, what: str, seen: torch.nn.Module, expected: torch.nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in seen.named_parameters():
        case.identical(f"{what}: {name}", parameter.detach(), theirs[name].detach())


def dtypes_of(case: Case, target: Target) -> tuple[torch.dtype, ...]:
    """Return the amp dtypes to check: both, but at level quick one in turn, except for AMP-RECIPE-002."""
    found = case.supported(target)
    number = int(case.contract.id[-3:])
    return found if case.level != "quick" or number == 2 else (found[number % len(found)],)


def run(recipe: Recipe, amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Yield the steps of a program from a fixed random state, with deterministic convolutions."""
    seed_torch(3)
    with repeatable_convolutions():
        yield from recipe(amp, draw, steps)
