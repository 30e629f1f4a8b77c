"""Check that the gradients of normalizations of long rows add up in more than 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .long_rows import (
    NORMALIZATIONS,
    ROWS,
    SOFTMAXES,
    Layout,
    allowed_of_input,
    allowed_of_parameter,
    drawn_length,
    far_from_zero,
    kept_logarithms,
    size_of_normalization,
    size_of_softmax,
)

# Of whole vectors and blocks, which kernels take by another path, and between them.
LENGTHS = (64, 130, 512, 518, 640, 1024, 2054, 4096)
ROUNDINGS = 2.0


def _lengths(case: Case, rng: torch.Generator) -> list[int]:
    """Return some lengths, among them long ones, and one that is drawn."""
    drawn = drawn_length(rng)
    return [*LENGTHS[-1 :: -case.samples(quick=3, standard=1, full=1)], drawn]


class _Run(NamedTuple):
    """Operands with their gradients, on the device and in float64; the gradient that came in, as rows in float64."""

    leaves: list[Tensor]
    wide: list[Tensor]
    incoming: Tensor
    result: torch.dtype

    def worst(self, place: int, allowed: Tensor) -> float:
        """Return the largest error of the gradient of an operand, in units of what is allowed."""
        seen, exact = self.leaves[place].grad, self.wide[place].grad
        return float(((seen.cpu().double() - exact).abs() / allowed).max())


def _run(
    case: Case,
    target: Target,
    dtype: torch.dtype,
    rng: torch.Generator,
    name: str,
    call: Callable[..., Tensor],
    layout: Layout,
    operands: Sequence[Tensor],
) -> _Run:
    """Run a call in a region and in float64, from a result whose gradient is far from zero back to the operands."""
    leaves = [one.to(target.device, copy=True).requires_grad_() for one in operands]
    wide = [one.double().requires_grad_() for one in operands]
    detached = functools.partial(call, *(one.detach() for one in leaves))
    case.require_call(target, f"compute {name} of {FORMATS[dtype].name}", detached)
    with target.autocast(dtype):
        result = call(*leaves)
    incoming = far_from_zero(operands[0].numel() // ROWS, result.dtype, rng)
    result.backward(torch.empty_like(result, requires_grad=False).copy_(layout(incoming)))
    call(*wide).backward(layout(incoming.double()))
    return _Run(leaves, wide, incoming.double(), result.dtype)


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_gradients_of_long_rows(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Rows and incoming gradients far from zero, whose sums would lose digits in 16 bits."""
    case.require_arithmetic(target, amp_dtype)
    op, form = NORMALIZATIONS[name], FORMATS[amp_dtype]
    for length in _lengths(case, rng):
        rows = far_from_zero(length, amp_dtype, rng)
        operands = (op.layout(rows), *op.parameters(ROWS, length, rng))
        run = _run(case, target, amp_dtype, rng, name, op.call, op.layout, operands)
        x, weight, gradient = rows.double(), run.wide[1].detach(), run.incoming
        size = size_of_normalization(x, weight[:, None] if op.by_row else weight, gradient)
        allowed = allowed_of_input(run.wide[0].grad, op.layout(size), length, form)
        what = f"{length} elements: worst error of the gradient of the"
        case.at_most(f"{what} input", run.worst(0, allowed), ROUNDINGS, "of the bound")
        if op.by_row:  # the others are sums over rows: AMP-NUMERICS-066
            normalized = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            for place, of, terms in ((1, "weight", gradient * normalized), (2, "bias", gradient)):
                allowed = allowed_of_parameter(terms, length, form)
                case.at_most(f"{what} {of}", run.worst(place, allowed), ROUNDINGS, "of the bound")


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_gradients_of_long_rows(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Rows and incoming gradients far from zero, whose sums would lose digits in 16 bits."""
    case.require_arithmetic(target, amp_dtype)
    (op, layout), logarithm = SOFTMAXES[name], name.startswith("log")
    for length in _lengths(case, rng):
        rows = far_from_zero(length, amp_dtype, rng)
        run = _run(case, target, amp_dtype, rng, name, op, layout, (layout(rows),))
        x = rows.double()
        size = size_of_softmax(x.log_softmax(1) if logarithm else x.softmax(1), run.incoming, logarithm)
        allowed = allowed_of_input(run.wide[0].grad, layout(size), length, FORMATS[amp_dtype])
        if logarithm:
            allowed = allowed + layout(kept_logarithms(x, run.incoming, FORMATS[run.result]))
        what = f"{length} elements: worst error of the gradient"
        case.at_most(what, run.worst(0, allowed), ROUNDINGS, "of the bound")
