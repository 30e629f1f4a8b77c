"""The comparison of 16-bit values with float64: what it lets pass, what it does not, and what is no kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conformance.chapters.numerics import value_error
from conformance.chapters.numerics.value_ops import OPS, ValueOp
from conformance.oracles.numbers.formats import FP16

CPU = torch.device("cpu")


def _run(call: Callable[[Tensor], Tensor], x: Tensor) -> value_error.Run:
    return value_error.called(call, x, lambda operand: operand, CPU, contextlib.nullcontext)


def _halved_in_16_bits(x: Tensor) -> Tensor:
    """Double and halve, which leaves the range of fp16 but not of the others."""
    return x * 2 / 2


def test_a_lost_result_is_found() -> None:
    x = torch.tensor([[40_000.0, 1.0]], dtype=torch.float16)

    assert value_error.lost(_run(_halved_in_16_bits, x), FP16) == [(float("inf"), 40_000.0)]
    assert value_error.lost(_run(lambda x: x * 1.5, x), FP16) == []  # 60,000 is too near the end to tell
    assert value_error.lost(_run(lambda x: x * 4, x), FP16) == []  # beyond the range


def test_one_rounding_is_within_the_bound_and_a_lost_term_is_not() -> None:
    op = ValueOp("sum", lambda x: x.sum(-1))
    x = (torch.arange(300) / 256).half()[None]

    assert value_error.result_error(_run(op.call, x), op, FP16)[0] <= 1
    dropped = _run(lambda x: x[..., 1:].sum(-1) if x.dtype is torch.float16 else x[..., :-1].sum(-1), x)
    assert value_error.result_error(dropped, op, FP16)[0] > 1


def test_a_sum_that_cancels_is_judged_by_its_terms() -> None:
    op = ValueOp("sum", lambda x: x.sum(-1))
    x = torch.tensor([[1000.0, -1000.0, 0.5]], dtype=torch.float16)
    off = _run(lambda x: x.sum(-1) + (0.5 if x.dtype is torch.float16 else 0.0), x)

    assert value_error.result_error(off, op, FP16)[0] <= 1


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_special_value_that_is_made_has_no_bound(special: float) -> None:
    op = ValueOp("shift", lambda x: x + 1)
    made = _run(lambda x: x + (special if x.dtype is torch.float16 else 1), torch.ones(1, 3).half())

    assert value_error.result_error(made, op, FP16)[0] > 1


def test_a_gradient_of_another_layout_is_not_within_the_bound() -> None:
    x = torch.rand(4, 4).half()
    weights = torch.arange(16.0).view(4, 4)
    right = _run(lambda x: (x * weights.to(x)).sum(), x).gradients(1.0, 1.0)
    turned = _run(lambda x: (x * (weights.t() if x.dtype is torch.float16 else weights).to(x)).sum(), x)
    wrong = turned.gradients(1.0, 1.0)

    assert right is not None
    assert wrong is not None
    assert value_error.gradient_error(right, FP16)[0] <= 1
    assert value_error.gradient_error(wrong, FP16)[0] > 1


def test_only_a_missing_kernel_is_a_refusal() -> None:
    assert value_error.refusal(NotImplementedError("\"pdist\" not implemented for 'Half'")) is not None
    assert value_error.refusal(RuntimeError("expected scalar type Half but found Float")) is None


def test_layouts_change_no_value() -> None:
    x = torch.rand(5, 6)

    assert all(torch.equal(layout(x), x) for layout in value_error.LAYOUTS.values())
    assert len({layout(x).stride() for layout in value_error.LAYOUTS.values()}) == len(value_error.LAYOUTS)


def test_each_op_takes_the_shapes_that_it_is_given() -> None:
    for op in OPS.values():
        for shape in [(37, 33), *([(2, 6_000)] if op.long else []), *([(3, 1)] if op.single else [])]:
            op.call(torch.ones(shape, dtype=torch.float64))
