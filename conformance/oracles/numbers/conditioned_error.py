"""The error of a 16-bit result, in roundings: of the result itself, and of the numbers that it is computed from.

No bound holds for every op, since the terms of an op cancel or grow as they please. What every op can keep is mixed
stability: its result is near the exact result of numbers that are near the given ones (Higham, Accuracy and Stability
of Numerical Algorithms, 2nd edition, section 1.5). How far results move with their operands is measured by moving the
operands of the float64 reference within one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .binary import Format


def moved(tensor: Tensor, form: Format, generator: torch.Generator) -> Tensor:
    """Return a float64 tensor with each number moved by up to one rounding to `form`, drawn uniformly."""
    draws = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return tensor * (1 + draws * form.unit_roundoff)


def roundings(
    seen: Tensor, exact: Tensor, form: Format, near: Sequence[Tensor] = (), *, together: bool = False
) -> float:
    """Return the largest error of `seen`, any floating tensor on the CPU, in roundings; inf where it is not finite.

    One rounding is `form`'s of the float64 number in `exact`, and the distance of that from any result `near` it, of
    moved operands or of float32. Where this leaves the range of `form`, all is right; where the exact number is not
    finite, and no near one differs, `seen` is the same. Zero for an empty tensor. `together` counts no number as
    smaller than the root mean square of all: what several ops compute in a row rounds at that size on the way.
    """
    if not exact.numel():
        return 0.0
    spread = torch.zeros_like(exact)
    for other in near:
        spread = torch.maximum(spread, _distance(other.detach().double(), exact))
    finite = exact.isfinite()
    size = torch.where(finite, exact.abs(), 1.0)
    if together:
        size = size.clamp_min(float(torch.where(finite, exact, 0.0).square().mean().sqrt()))
    smallest = form.smallest_normal * form.unit_roundoff
    error = _distance(seen.detach().double(), exact) / ((size * form.unit_roundoff).clamp_min(smallest) + spread)
    within = size * (1 + 4 * form.unit_roundoff) + 4 * spread <= form.largest
    return float(torch.where(torch.where(finite, within, spread.isfinite()), error, 0.0).max())


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """Return the distance of each number to another: 0 between equal infinities and NaNs, inf to any other number."""
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, (left - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
