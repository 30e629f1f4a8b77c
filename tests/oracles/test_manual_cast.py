"""Casting by hand follows Python functions to the ops inside, casts what is eligible, and weights once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from conformance.chapters.cast.models import programs
from conformance.oracles.manual_cast import ManualCast
from conformance.oracles.trace.ops import CAST, Op, OpTrace, first_difference

LOW = torch.bfloat16


def _by_hand(device_type: str = "cpu") -> ManualCast:
    return ManualCast(device_type, LOW)


def test_products_are_cast_and_the_rest_is_left_alone() -> None:
    x = torch.ones(2, 2)
    with _by_hand():
        kinds = [(x @ x).dtype, (x + x).dtype, F.relu(x).dtype, torch.mm(x.double(), x.double()).dtype]

    assert kinds == [LOW, torch.float32, torch.float32, torch.float64]


def test_a_trained_weight_is_cast_once_and_gets_its_gradient() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with _by_hand(), OpTrace() as trace:
        output = (x @ weight) + (x @ weight)
    output.sum().backward()

    assert sum(op.name == CAST for op in trace.ops) == 3
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_fp32_is_asked_for_where_an_op_takes_a_dtype() -> None:
    with FakeTensorMode(), _by_hand("cuda"), OpTrace() as trace:
        x = torch.empty(2, 2, device="cuda", dtype=torch.float16)
        kinds = [F.softmax(x, 1).dtype, F.softmax(x, 1, dtype=LOW).dtype, x.sum(dtype=LOW).dtype, x.exp().dtype]

    assert kinds == [torch.float32, LOW, LOW, torch.float32]
    # Only that of exp: softmax and sum are asked for their type.
    assert trace.casts(torch.float16, torch.float32) == 1


def test_python_functions_are_followed_into_their_body() -> None:
    with FakeTensorMode(), _by_hand("cuda"):
        x = torch.empty(2, 2, 4, device="cuda", dtype=LOW)
        kinds = [F.normalize(x).dtype, (2**x).dtype, F.max_pool1d(x, 2).dtype, torch.einsum("bij->ij", x).dtype]

    assert kinds == [torch.float32, torch.float32, LOW, LOW]


def test_regions_nest() -> None:
    regions = ManualCast("cpu")
    weight, x = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4)

    with regions.region(torch.bfloat16):
        low = F.linear(x, weight)
        kept = F.relu(low) + x[:, :3]
        with regions.region(None):
            off = F.linear(x, weight)
        with regions.region(torch.float16):
            other = torch.mm(low, kept.T)
        loss = F.mse_loss(low, low)
    after = F.linear(x, weight)

    types = [tensor.dtype for tensor in (low, kept, off, other, loss, after)]
    single = torch.float32
    assert types == [torch.bfloat16, single, single, torch.float16, single, single]


def test_a_weight_is_cast_once_in_an_outermost_region() -> None:
    regions = ManualCast("cpu")
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3)
    for _ in range(2):
        with OpTrace() as trace, regions.region(torch.float16):
            F.linear(F.linear(x, weight), weight)
        # The input and the weight, and neither for the second layer.
        assert trace.casts(torch.float32, torch.float16) == 2

    with regions.region(torch.float16):
        with torch.no_grad():
            F.linear(x, weight)
        assert F.linear(x, weight).requires_grad


def test_a_weight_is_cast_once_to_each_type() -> None:
    casts = ManualCast("cpu")
    weight = torch.ones(2, 2, requires_grad=True)
    with casts.region(torch.float16):
        with casts.region(torch.bfloat16):
            inner = torch.mm(weight, weight)
        outer = torch.mm(weight, weight)
        assert len(casts.copies) == 2

    assert (inner.dtype, outer.dtype, casts.copies) == (torch.bfloat16, torch.float16, {})


def test_cross_entropy_is_followed_where_it_has_no_policy_of_its_own() -> None:
    with FakeTensorMode(), _by_hand("cuda"), OpTrace() as trace:
        x = torch.empty(3, 5, device="cuda", dtype=torch.float16)
        loss = F.cross_entropy(x, torch.zeros(3, device="cuda", dtype=torch.int64))

    assert loss.dtype == torch.float32
    assert [str(op) for op in trace.computing] == [
        "_log_softmax(float16) -> float16",
        "nll_loss_forward(float32) -> float32, float32",
    ]


def test_lists_are_brought_to_their_widest_type() -> None:
    with _by_hand():
        kinds = [
            torch.cat([torch.ones(1, dtype=LOW), torch.ones(1)]).dtype,
            torch.stack([torch.ones(1, dtype=LOW)] * 2).dtype,
        ]

    assert kinds == [torch.float32, LOW]


def test_calls_with_out_and_in_place_are_left_alone() -> None:
    x, out = torch.ones(2, 2), torch.ones(2, 2)
    with _by_hand(), OpTrace() as trace:
        torch.mm(x, x, out=out)
        out.addmm_(x, x)

    assert [op.name for op in trace.floating] == ["aten::mm", "aten::addmm_"]


@pytest.mark.parametrize("name", list(programs()))
def test_a_program_in_fp32_gives_a_finite_loss_and_a_gradient_to_every_parameter(name: str) -> None:
    program = programs()[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().reshape(shape)

    weights = program.weights(draw)
    names = [parameter for parameter, _ in program.network.named_parameters()]
    for parameter in names:
        weights[parameter].requires_grad_()
    _, loss = program(weights, program.inputs(draw, torch.device("cpu")))
    loss.backward()

    assert loss.isfinite()
    assert all(weights[parameter].grad is not None for parameter in names)
    assert {prefix for prefix in program.lowered if not any(p.startswith(prefix) for p in names)} == set()


def test_the_first_difference_of_two_streams_is_named() -> None:
    product, other = Op("aten::mm", (LOW, LOW), (LOW,)), Op("aten::mm", (torch.float32,) * 2, (torch.float32,))

    assert first_difference([product], [product]) is None
    assert first_difference([product, other], [product, product]) == (
        "op 2 of 2 is mm(float32, float32) -> float32, predicted: mm(bfloat16, bfloat16) -> bfloat16"
    )
    assert first_difference([product], []) == "op 1 of 1 is mm(bfloat16, bfloat16) -> bfloat16, predicted: none"
    assert first_difference([], [product]) == "op 1 of 1 is missing, predicted: mm(bfloat16, bfloat16) -> bfloat16"
