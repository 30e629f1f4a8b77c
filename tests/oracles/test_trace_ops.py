"""The stream of dtypes sees forward and backward ops and tells arithmetic from bookkeeping."""

from __future__ import annotations

import torch

from conformance.oracles.trace.ops import DtypeStream, Op, stream_of


def test_a_product_and_its_backward() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    with DtypeStream() as ahead:
        output = torch.randn(2, 4).bfloat16() @ weight.bfloat16().T
    back = stream_of(lambda: output.backward(torch.ones_like(output)))

    single = (torch.bfloat16,)
    assert [op for op in ahead.computing if "mm" in op.name] == [Op("aten::mm", single * 2, single)]
    assert [op for op in back.computing if "mm" in op.name] == [Op("aten::mm", single * 2, single)]
    assert back.casts(torch.bfloat16, torch.float32) == 1


def test_views_and_integers_do_not_compute() -> None:
    stream = stream_of(lambda: (torch.ones(4).view(2, 2).t(), torch.arange(3) + 1))

    assert [op.name for op in stream.computing] == []
