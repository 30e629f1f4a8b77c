"""Helpers of the recipe checks: random data, comparison of tensors and weights, and the dtypes of a check."""

from __future__ import annotations

import torch

from ...harness.check import Case
from ...harness.targets import Target
from .recipes import Draw


def same_weights(case: Case, what: str, seen: torch.nn.Module, expected: torch.nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in seen.named_parameters():
        case.identical(f"{what}: {name}", parameter.detach(), theirs[name].detach())


def normal(target: Target, seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (0.4 * torch.randn(shape, generator=generator)).to(target.device)


def same(seen: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether dtype, shape and bits agree; NaNs agree with NaNs."""
    if seen.dtype != expected.dtype or seen.shape != expected.shape:
        return False
    return torch.equal(seen, expected) or bool(((seen == expected) | ((seen != seen) & (expected != expected))).all())


def dtypes_of(case: Case, target: Target) -> tuple[torch.dtype, ...]:
    """Return the amp dtypes to check: both, but at level quick one in turn, except for AMP-RECIPE-002."""
    found = case.supported(target)
    number = int(case.contract.id[-3:])
    return found if case.level != "quick" or number == 2 else (found[number % len(found)],)
