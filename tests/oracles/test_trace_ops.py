"""The trace records forward and backward ops, tells arithmetic from bookkeeping, and keeps no tensor alive."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.trace import counts
from conformance.oracles.trace.casts import alive
from conformance.oracles.trace.ops import Op, OpTrace, identity, trace_of


def test_a_product_and_its_backward() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    with OpTrace() as ahead:
        output = torch.randn(2, 4).bfloat16() @ weight.bfloat16().T
    back = trace_of(lambda: output.backward(torch.ones_like(output)))

    single = (torch.bfloat16,)
    assert [op for op in ahead.computing if "mm" in op.name] == [Op("aten::mm", single * 2, single)]
    assert [op for op in back.computing if "mm" in op.name] == [Op("aten::mm", single * 2, single)]
    assert back.casts(torch.bfloat16, torch.float32) == 1


def test_views_and_integers_do_not_compute() -> None:
    stream = trace_of(lambda: (torch.ones(4).view(2, 2).t(), torch.arange(3) + 1))

    assert [op.name for op in stream.computing] == []


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_casts_of_one_tensor(mode: type[torch.no_grad]) -> None:
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2)

    with OpTrace() as trace, mode():
        weight.to(torch.float16)
        weight.bfloat16()
        other.to(torch.float16)
        weight.to(torch.float32, copy=True)
        weight * 2

    assert len(trace.casts_of(weight)) == 2


def test_records_only_while_entered() -> None:
    weight = torch.ones(2)

    with OpTrace() as trace:
        pass
    weight.half()

    assert len(trace.casts_of(weight)) == 0


def test_keeps_nothing_alive() -> None:
    weight = torch.arange(3.0)

    with OpTrace() as trace:
        kept = weight.half()
        weight.bfloat16()

    assert [cast.dtype for cast in alive(trace.casts_of(weight))] == [torch.float16]
    assert alive(trace.casts_of(weight))[0] is kept
    del kept
    assert alive(trace.casts_of(weight)) == []


def test_ops_are_counted_by_name_and_size() -> None:
    trace = trace_of(lambda: (torch.ones(4).double().view(2, 2).sum().item(), torch.ones(2) + 1))

    assert counts.by_name(trace.ops)["ones"] == 2
    assert (counts.casts(trace.ops), counts.reads(trace.ops)) == (1, 1)
    assert counts.work(trace.ops, least=3) == {"sum": 1}


def test_ops_are_equal_by_name_and_types() -> None:
    assert trace_of(lambda: torch.ones(2) + 1).computing == [Op("aten::add", (torch.float32,), (torch.float32,))]


def test_tensors_of_a_functionalizing_backend_are_known() -> None:
    """As below XLA: ops get the tensors that the caller's wrap, and views are copies."""
    weight = torch._to_functional_tensor(torch.randn(5, 4))
    torch._enable_functionalization(reapply_views=False)
    try:
        with OpTrace() as trace:
            weight.half().t()
            casts = trace.casts_of(weight)
            weight.add_(1)
            view = weight.view(4, 5)
            view.half()
    finally:
        torch._disable_functionalization()

    assert casts == trace.conversions[:1]
    assert [one.tensor for one in trace.conversions][-1:] == [one.tensor for one in trace.casts_of(view)]
    assert "aten::t" in [op.name for op in trace.ops]


def test_tensor_of_a_functionalizing_backend_is_not_taken_for_one_that_is_gone() -> None:
    """Python's object of the tensor that is wrapped is made when it is asked for, where those of others were."""
    whole = torch._to_functional_tensor(torch.ones(4))
    torch._enable_functionalization(reapply_views=False)
    try:
        results = [whole + number for number in range(50)]
    finally:
        torch._disable_functionalization()
    others = [torch.ones(1) for _ in range(100)]
    gone = {identity(one) for one in others}
    del others

    assert not gone & {identity(one) for one in results}
