"""Check that the gradients of normalizations of long rows add up in more than 16 bits."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .long_rows import (
    DEVIATIONS,
    NORMALIZATIONS,
    SOFTMAXES,
    Layout,
    allowed_of_input,
    allowed_of_parameter,
    as_rows,
    kept_logarithms,
    size_of_normalization,
    size_of_softmax,
)

ROWS = 8
# Of whole vectors and blocks, which kernels take by another path, and between them.
LENGTHS = (64, 130, 512, 518, 640, 1024, 2054, 4096)
ROUNDINGS = 2.0


def _lengths(case: Case, rng: torch.Generator) -> list[int]:
    """Return some lengths, among them long ones, and one that is drawn."""
    drawn = 64 * int(torch.randint(8, 80, (), generator=rng))
    return [*LENGTHS[-1 :: -case.samples(quick=3, standard=1, full=1)], drawn]


def _incoming(result: Tensor, layout: Layout, shape: torch.Size, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return an incoming gradient in type and layout of a result, and its rows in float64; their sums are not zero."""
    rows = (torch.randn(shape, generator=rng) + DEVIATIONS).to(result.dtype)
    return torch.empty_like(result, requires_grad=False).copy_(layout(rows)), rows.double()


def _ratio(seen: Tensor, exact: Tensor, allowed: Tensor) -> float:
    return float(((seen.detach().cpu().double() - exact).abs() / allowed).max())


def _far_from_zero(length: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return (torch.randn(ROWS, length, generator=rng) + DEVIATIONS).to(dtype)


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_gradients_of_long_rows(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Rows and incoming gradients far from zero, whose sums would lose digits in 16 bits."""
    case.require_arithmetic(target, amp_dtype)
    op, form = NORMALIZATIONS[name], FORMATS[amp_dtype]
    for length in _lengths(case, rng):
        rows = _far_from_zero(length, amp_dtype, rng)
        operands = (op.layout(rows), *op.parameters(ROWS, length, rng))
        leaves = [one.to(target.device, copy=True).requires_grad_() for one in operands]
        wide = [one.double().requires_grad_() for one in operands]
        call = functools.partial(op.call, *(one.detach() for one in leaves))
        case.require_call(target, f"compute {name} of {form.name}", call)
        with target.autocast(amp_dtype):
            result = op.call(*leaves)
        incoming, gradient = _incoming(result, op.layout, rows.shape, rng)
        result.backward(incoming)
        op.call(*wide).backward(op.layout(gradient))
        x, weight = rows.double(), wide[1].detach()
        size = size_of_normalization(x, weight[:, None] if op.by_row else weight, gradient)
        allowed = allowed_of_input(wide[0].grad, op.layout(size), length, form)
        what = f"{length} elements: worst error of the gradient of the"
        case.at_most(f"{what} input", _ratio(leaves[0].grad, wide[0].grad, allowed), ROUNDINGS, "of the bound")
        if op.by_row:  # the others are sums over rows: AMP-NUMERICS-066
            normalized = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            for place, of, terms in ((1, "weight", gradient * normalized), (2, "bias", gradient)):
                allowed = allowed_of_parameter(terms, length, form)
                ratio = _ratio(leaves[place].grad, wide[place].grad, allowed)
                case.at_most(f"{what} {of}", ratio, ROUNDINGS, "of the bound")


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_gradients_of_long_rows(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Rows and incoming gradients far from zero, whose sums would lose digits in 16 bits."""
    case.require_arithmetic(target, amp_dtype)
    (op, layout), form, logarithm = SOFTMAXES[name], FORMATS[amp_dtype], name.startswith("log")
    for length in _lengths(case, rng):
        rows = _far_from_zero(length, amp_dtype, rng)
        x = layout(rows)
        leaf, wide = x.to(target.device, copy=True).requires_grad_(), x.double().requires_grad_()
        case.require_call(target, f"compute {name} of {form.name}", functools.partial(op, leaf.detach()))
        with target.autocast(amp_dtype):
            result = op(leaf)
        incoming, gradient = _incoming(result, layout, rows.shape, rng)
        result.backward(incoming)
        exact = op(wide)
        exact.backward(layout(gradient))
        kept = exact.detach() if layout is as_rows else exact.detach().t()
        allowed = allowed_of_input(wide.grad, layout(size_of_softmax(kept, gradient, logarithm)), length, form)
        if logarithm:
            allowed = allowed + layout(kept_logarithms(rows.double(), gradient, FORMATS[result.dtype]))
        what = f"{length} elements: worst error of the gradient"
        case.at_most(what, _ratio(leaf.grad, wide.grad, allowed), ROUNDINGS, "of the bound")
