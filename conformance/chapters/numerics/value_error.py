"""Compare the 16-bit result and gradient of an op with those of the same operands in float32 and float64.

The bound is a mixed forward and backward one (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002,
sections 1.5 and 3.1): a kernel that adds up in float32 returns the exact result of operands that are n units of float32
off, rounded to its type; each intermediate tensor in the 16-bit type is one rounding more. With J the derivative of the
result by the operand x that is (k u16 + n u32) (|y| + |J| |x|) for k roundings and n terms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...oracles.numbers.formats import Format
from ...oracles.numbers.running_error import UNIT
from .op_error import Region
from .value_ops import Call, ValueOp

ROUNDINGS = 4
"""Tensors of the 16-bit type that an op may go through: of torch's compositions in Python and C++ those of
cosine_similarity and the losses have most."""

BACKWARD_ROUNDINGS = 32
"""Eight for each of them: a formula of tools/autograd/derivatives.yaml has up to four operations, each of which rounds,
on results that were rounded when they were saved (an exponential of a log-probability near -10 passes on ten of these).
In units of the largest element, since a gradient is a difference of such products."""

_PRIME = 7919

NEAR = 0.9
"""The part of the range up to which a result must be finite: two roundings of bf16 are below the rest."""

MOST = 6
"""How many elements outside of the cheap bound get the one with the derivative."""

Shape = tuple[int, ...]
Draw = Callable[[Format, torch.Generator, Shape], Tensor]


# --- data


def _range(form: Format) -> tuple[float, float]:
    """Return the smallest and the largest size of operands: sums of their squares are numbers of float32."""
    return max(form.smallest_normal, 2.0**-60), min(form.largest, 2.0**60)


def _sized(
    size: Callable[[Format], float], *, signed: bool = True
) -> Callable[[Format, torch.Generator, Shape], Tensor]:
    """Return what draws numbers from 0.5 to 1.5 times a size, with random signs or all positive."""

    def draw(form: Format, rng: torch.Generator, shape: Shape) -> Tensor:
        numbers = size(form) * (torch.rand(shape, generator=rng).double() + 0.5)
        return numbers * (2.0 * torch.randint(0, 2, shape, generator=rng) - 1) if signed else numbers

    return draw


def _apart(form: Format, rng: torch.Generator, shape: Shape) -> Tensor:
    """Return ones, with another last element of each row."""
    ones = torch.ones(shape, dtype=torch.float64)
    ones[..., -1:] = 64.0
    return ones


# Sizes at which intermediate results leave the range while the result does not.
MAGNITUDES: dict[str, Draw] = {
    "huge": _sized(lambda form: _range(form)[1] / 4, signed=False),
    "huge and negative": _sized(lambda form: -_range(form)[1] / 4, signed=False),
    "large": _sized(lambda form: 4 * math.sqrt(_range(form)[1])),
    "wide": _sized(lambda form: math.sqrt(_range(form)[1]) / 4),
    "small": _sized(lambda form: math.sqrt(_range(form)[0]) / 32),
    "tiny": _sized(lambda form: _range(form)[0] / 256),
}
# The same size with both signs: a difference of two operands leaves the range as well.
OPPOSED: dict[str, Draw] = {"huge and opposed": _sized(lambda form: 0.6 * _range(form)[1])}
ORDINARY: dict[str, Draw] = {
    "same sign": _sized(lambda form: 1.0, signed=False),
    "plain": lambda form, rng, shape: torch.randn(shape, generator=rng).double(),
    "one apart": _apart,
}

# Strides of the operand, which change no value.
LAYOUTS: dict[str, Call] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, -x], -1)[..., 0],
}


# --- one run


@dataclass(frozen=True)
class Run:
    """Result of one call in 16 bits on the device, and in float32 and float64 on the CPU, with the operand of each."""

    seen: Tensor
    wide: Tensor
    exact: Tensor
    operands: tuple[Tensor, Tensor, Tensor]

    @property
    def is_differentiable(self) -> bool:
        return self.seen.requires_grad and self.exact.requires_grad

    def gradients(self, low: float, high: float) -> Run | None:
        """Return the gradients for an incoming one from `low` to `high`; None where the result has none."""
        count = self.exact.numel()
        # A row has numbers of the whole range, whatever its length, in no order.
        steps = (torch.arange(count) * _PRIME).remainder(count).double() / max(count, 1)
        seed = (low + (high - low) * steps).view_as(self.exact).to(self.seen.dtype)
        found = [
            torch.autograd.grad(result, operand, seed.to(result), allow_unused=True)[0]
            for result, operand in zip((self.seen, self.wide, self.exact), self.operands, strict=True)
        ]
        return None if any(one is None for one in found) else Run(found[0], found[1], found[2], self.operands)


def called(call: Call, x: Tensor, layout: Call, device: torch.device, region: Region) -> Run:
    """Call an op in `region` on a 16-bit operand on the device, and on copies in float32 and float64 on the CPU."""
    wide, exact = (x.to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
    low = x.to(device, copy=True).requires_grad_()
    with region():
        seen = call(layout(low))
    return Run(seen, call(wide), call(exact), (low, wide, exact))


def refusal(error: Exception) -> str | None:
    """Return what an error says where the op has no kernel for the type, or None for any other error."""
    named = re.search("not (implemented|supported) for '?(Half|BFloat16)|Low precision", str(error))
    return f"{type(error).__name__}: {error}".split("\n")[0] if named else None


def lost(run: Run, form: Format) -> list[tuple[float, float]]:
    """Return what is not finite, and its value, where float32 and float64 give numbers well within the range."""
    seen, wide, exact = (tensor.detach().cpu().double() for tensor in (run.seen, run.wide, run.exact))
    within = (wide.abs() <= NEAR * form.largest) & (exact.abs() <= NEAR * form.largest)
    at = within & ~seen.isfinite()
    return list(zip(seen[at].tolist(), exact[at].tolist(), strict=True))


def misplaced(run: Run, form: Format) -> list[tuple[float, float]]:
    """Return the larger ones of the results that are off by half where float32 is not, and their values."""
    seen, wide, exact = (tensor.detach().cpu().double() for tensor in (run.seen, run.wide, run.exact))
    within = (exact.abs() <= NEAR * form.largest) & (exact.abs() >= 2**10 * form.smallest) & seen.isfinite()
    within &= (wide - exact).abs() <= exact.abs() / 8
    largest = float(exact.abs()[within].max()) if bool(within.any()) else 0.0
    at = within & (exact.abs() >= largest / 4) & ((seen - exact).abs() > exact.abs() / 2)
    return list(zip(seen[at].tolist(), exact[at].tolist(), strict=True))


def terms(run: Run) -> int:
    """Return how many numbers may go into an element of the result."""
    operand = run.operands[2]
    return max(operand.shape[-1], operand.numel() // max(run.exact.numel(), 1))


def result_error(run: Run, op: ValueOp, form: Format) -> tuple[float, str]:
    """Return the worst error of an element of the result in units of its bound, and what it is."""
    seen, exact = run.seen.detach().cpu().double(), run.exact.detach()
    relative = ROUNDINGS * form.unit_roundoff + terms(run) * UNIT
    size = op.size(run.operands[2].detach()) if op.size is not None else 0.0
    bound = relative * (exact.abs() + size) + ROUNDINGS * form.smallest / 2
    # What is beyond the range, or ought not to be, is the matter of `lost`.
    beyond = (exact.abs() > NEAR * form.largest) & ~exact.isinf()
    same = (seen == exact) | (seen.isnan() & exact.isnan()) | beyond
    off = (seen - exact).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf).flatten()
    ratios = off / bound.flatten().nan_to_num(nan=1.0, posinf=1.0)
    worst = (0.0, "")
    for place in ratios.argsort(descending=True)[:MOST].tolist():
        ratio = float(ratios[place])
        if ratio > 1 and math.isfinite(ratio) and run.exact.requires_grad:
            (slope,) = torch.autograd.grad(run.exact.flatten()[place], run.operands[2], retain_graph=True)
            through = float((slope * run.operands[2].detach()).abs().sum())
            ratio = float(off[place] / (bound.flatten()[place] + relative * through))
        worst = max(worst, (ratio, f"{float(seen.flatten()[place]):.6g} for {float(exact.flatten()[place]):.6g}"))
    return worst


def gradient_error(run: Run, form: Format) -> tuple[float, str]:
    """Return the worst error of an element of a gradient, in units of a bound on all of them, and what it is."""
    seen, exact = run.seen.detach().cpu().double().flatten(), run.exact.detach().flatten()
    largest = float(exact.abs().max())
    relative = BACKWARD_ROUNDINGS * form.unit_roundoff + run.operands[2].numel() * UNIT
    off = (seen - exact).abs().masked_fill(exact.abs() > NEAR * form.largest, 0.0)
    ratios = off / (relative * largest + BACKWARD_ROUNDINGS * form.smallest / 2)
    place = int(ratios.nan_to_num(nan=math.inf).argmax())
    worst = float(ratios.nan_to_num(nan=math.inf)[place])
    return worst, f"{float(seen[place]):.6g} for {float(exact[place]):.6g}"
