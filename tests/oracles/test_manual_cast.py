"""Casting by hand follows Python functions to the ops inside, casts what is eligible, and weights once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from conformance.chapters.cast.models import programs
from conformance.oracles.manual_cast import HandCast, casts_last_first
from conformance.oracles.trace.ops import CAST, Op, OpTrace, first_difference

LOW = torch.bfloat16


def _by_hand(device_type: str = "cpu") -> HandCast:
    return HandCast(device_type, LOW)


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


@pytest.mark.parametrize("enabled", [True, False])
def test_the_order_of_casts_is_read_from_a_call(enabled: bool) -> None:
    seen = casts_last_first(torch.device("cpu"), lambda: torch.autocast("cpu", LOW, enabled=enabled))

    assert isinstance(seen, bool)
    assert not seen or enabled


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
