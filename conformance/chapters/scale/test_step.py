"""Check that step() unscales once and skips for inf and NaN anywhere, and only then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...scaler import model as oracle
from ...workloads.third_party_optimizers import Ordinary, give, owning, parameters_of
from .support import EACH_NON_FINITE, FORMS, LAYOUTS, ROUTES, expected_unscaled, sparse, started, tracker


def expect_skip(case: Case, scaler: torch.amp.GradScaler, optimizer: Ordinary, what: str) -> None:
    """Expect that step() skips: it returns None, does not call the optimizer and keeps the bits of the parameters."""
    before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    answer = scaler.step(optimizer)
    case.equal(f"{what}: calls of optimizer.step", len(optimizer.calls), 0)
    case.equal(f"{what}: step() returns", answer, None)
    pairs = zip(parameters_of(optimizer), before, strict=True)
    changed = [index for index, (parameter, kept) in enumerate(pairs) if not same_bits(parameter, kept)]
    case.equal(f"{what}: parameters that changed", changed, [])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors hold the same bytes."""
    return torch.equal(*(tensor.detach().flatten().view(torch.uint8) for tensor in (one, other)))


@contract("AMP-SCALE-040")
@pytest.mark.parametrize("scale", [65536.0, 65535.0, deep("standard", 0.1), deep("standard", 1.0)], ids="{:g}".format)
def test_step_unscales(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    case.require_arithmetic(target, torch.float64)
    numbers = torch.randn(19, generator=rng)
    optimizer = owning(
        numbers.to(target.device, copy=True), kind=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    started(target, init_scale=scale).step(optimizer)
    gradient = parameters_of(optimizer)[0].grad
    expected = expected_unscaled(numbers, oracle.rounded(scale, oracle.FP32), gradient)
    case.identical("gradients after the step", gradient, expected)
    case.identical("parameters that were 0", parameters_of(optimizer)[0], -expected)


class RecordingScaler(torch.amp.GradScaler):
    """A scaler that records the optimizers for which unscale_ is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given_to_unscale: list[torch.optim.Optimizer] = []  # a name that no scaler has of its own

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.given_to_unscale.append(optimizer)
        super().unscale_(optimizer)


@contract("AMP-SCALE-040")
def test_step_invokes_unscale(case: Case, target: Target) -> None:
    scaler = RecordingScaler(target.device_type)
    scaler.scale(torch.ones((), device=target.device))
    optimizer = owning(torch.full((2,), 65536.0, device=target.device))
    scaler.step(optimizer)
    case.equal("calls of a subclass's unscale_ by step()", scaler.given_to_unscale == [optimizer], True)
    case.equal("gradients after step()", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-041")
@pytest.mark.parametrize("scale", [65536.0, 65535.0, deep("standard", 0.25)], ids="{:g}".format)
def test_step_does_not_unscale_again(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    optimizer = owning(torch.randn(19, generator=rng).to(target.device, copy=True))
    scaler = started(target, init_scale=scale)
    scaler.unscale_(optimizer)
    unscaled = parameters_of(optimizer)[0].grad.clone()
    scaler.step(optimizer)
    case.identical("gradients after the step", parameters_of(optimizer)[0].grad, unscaled)
    case.identical("parameters that were 0", parameters_of(optimizer)[0], -unscaled)


@contract("AMP-SCALE-042")
def test_gradients_changed_between(case: Case, target: Target) -> None:
    optimizer = owning(torch.tensor([65536.0, 131072.0], device=target.device))
    scaler = started(target)
    scaler.unscale_(optimizer)
    parameters_of(optimizer)[0].grad.mul_(0.25)
    scaler.step(optimizer)
    case.equal("parameters that were 0", parameters_of(optimizer)[0].tolist(), [-0.25, -0.5])


SIZES = (1, 9, *(deep("standard", size) for size in (2, 3, 7, 8, 31, 33, 1023, 4097)), deep("full", 1_000_003))


@contract("AMP-SCALE-043")
@EACH_NON_FINITE
@pytest.mark.parametrize("size", SIZES)
def test_skip_at_any_place(case: Case, target: Target, bad: float, size: int) -> None:
    for place in sorted({0, size // 2, size - 1}):
        gradient = torch.ones(size, device=target.device)
        gradient[place] = bad
        expect_skip(case, started(target), owning(gradient), f"{bad} at {place} of {size}")
    control = owning(torch.ones(size, device=target.device))
    started(target).step(control)
    case.equal("control: calls of optimizer.step if all is finite", len(control.calls), 1)


@contract("AMP-SCALE-043")
@EACH_NON_FINITE
@ROUTES
def test_skip_in_a_large_gradient(case: Case, target: Target, bad: float, explicit: bool) -> None:
    gradient = torch.ones(200_003, device=target.device)
    gradient[150_001] = bad
    optimizer = owning(gradient)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    expect_skip(case, scaler, optimizer, f"{bad} at 150001 of 200003")


@contract("AMP-SCALE-043")
def test_skip_when_all_is_bad(case: Case, target: Target) -> None:
    # As many infs as -infs: their sum is NaN, their product finite after a comparison with zero.
    for values in ([math.inf, -math.inf], [math.nan] * 8, [math.inf] * 33, [-math.inf, math.nan, math.inf]):
        gradient = torch.tensor(values, device=target.device)
        expect_skip(case, started(target), owning(gradient), f"{len(values)} non-finite elements")


@contract("AMP-SCALE-044")
@EACH_NON_FINITE
@ROUTES
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_skip_in_any_tensor(case: Case, target: Target, bad: float, explicit: bool, place: str) -> None:
    # More than the 110 tensors that one launch of CUDA's multi-tensor apply takes (MultiTensorApply.cuh).
    count = case.samples(quick=131, standard=131, full=500)
    index = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    gradients = [torch.ones(3, device=target.device) for _ in range(count)]
    gradients[index][-1] = bad
    optimizer = owning(*gradients)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    expect_skip(case, scaler, optimizer, f"{bad} in tensor {index} of {count}")


@contract("AMP-SCALE-044")
@EACH_NON_FINITE
@pytest.mark.parametrize("bad_group", [0, 1, 2])
def test_skip_in_any_group(case: Case, target: Target, bad: float, bad_group: int) -> None:
    parameters = [torch.zeros(2, device=target.device, requires_grad=True) for _ in range(3)]
    optimizer = Ordinary([{"params": [parameter]} for parameter in parameters])
    give(optimizer, 1.0)
    parameters[bad_group].grad[1] = bad
    expect_skip(case, started(target), optimizer, f"{bad} in group {bad_group}")


@contract("AMP-SCALE-045")
@EACH_NON_FINITE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skip_in_any_layout(case: Case, target: Target, bad: float, layout: str) -> None:
    for place in (0, 11, 23):
        numbers = torch.ones(24)
        numbers[place] = bad
        expect_skip(
            case, started(target), owning(LAYOUTS[layout](numbers.to(target.device, copy=True))), f"{bad} at {place}"
        )
    padded = torch.tensor([[1.0, bad]] * 3, device=target.device)
    control = owning(padded[:, 0])
    started(target).step(control)
    case.equal("control: calls of optimizer.step if only the gaps are non-finite", len(control.calls), 1)


@contract("AMP-SCALE-045")
@EACH_NON_FINITE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_skip_in_any_dtype(case: Case, target: Target, bad: float, dtype: torch.dtype) -> None:
    dtypes = dict.fromkeys((torch.float32, dtype, torch.float64))
    case.require_arithmetic(target, *dtypes)
    gradients = {kept: torch.ones(37, dtype=kept, device=target.device) for kept in dtypes}
    for place in (0, 18, 36):
        gradients[dtype].fill_(1.0)
        gradients[dtype][place] = bad
        expect_skip(case, started(target), owning(*gradients.values()), f"{bad} at {place} in {dtype}")


@contract("AMP-SCALE-045")
@EACH_NON_FINITE
def test_skip_in_sparse_gradients(case: Case, target: Target, bad: float) -> None:
    optimizer = owning(torch.zeros(8, device=target.device))
    parameters_of(optimizer)[0].grad = sparse([1.0, bad], torch.float32, target, coalesced=True)
    expect_skip(case, started(target), optimizer, f"{bad} in a sparse gradient")


@contract("AMP-SCALE-046")
def test_overflow_in_backward(case: Case, target: Target) -> None:
    # d(w * x)/dw = x in fp32: 2**16 * 2**112 = 2**128 is out of range, 2**16 * 2**111 is not.
    for exponent, calls, scale in ((112, 0, 32768.0), (111, 1, 65536.0)):
        weight = torch.zeros((), device=target.device, requires_grad=True)
        optimizer = Ordinary([weight])
        scaler = torch.amp.GradScaler(target.device_type)
        scaler.scale(weight * 2.0**exponent).backward()
        scaler.step(optimizer)
        scaler.update()
        case.equal(f"calls of optimizer.step at 2^{exponent}", len(optimizer.calls), calls)
        case.equal(f"scale after 2^{exponent}", scaler.get_scale(), scale)
        case.equal(f"weight after 2^{exponent}", weight.item(), -(2.0**exponent) * calls)


EXTREMES = {
    "largest": [oracle.FP32.largest],
    "largest-twice": [oracle.FP32.largest] * 2,
    "both-signs": [oracle.FP32.largest, -oracle.FP32.largest] * 17,
    "above-fp16": [65504.0, 65520.0, 65536.0, -1e30],
    "smallest": [oracle.FP32.smallest, -oracle.FP32.smallest],
    "subnormals": [k * oracle.FP32.smallest for k in range(1, 40)],
    "zeros": [0.0, -0.0] * 5,
    "all-ranges": [0.0, oracle.FP32.smallest, 1.0, oracle.FP32.largest],
}


@contract("AMP-SCALE-047")
@ROUTES
@pytest.mark.parametrize("name", EXTREMES)
def test_finite_extremes(case: Case, target: Target, explicit: bool, name: str) -> None:
    numbers = torch.tensor(EXTREMES[name])
    optimizer = owning(numbers.to(target.device, copy=True), torch.ones(2, device=target.device))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)
    gradient = parameters_of(optimizer)[0].grad
    case.identical("gradients after the step", gradient, expected_unscaled(numbers, 65536.0, gradient))
    scaler.update()
    case.equal("scale after update()", scaler.get_scale(), 65536.0)
    case.equal("growth tracker after update()", tracker(scaler), 1)


@contract("AMP-SCALE-047")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_finite_extremes_of_other_dtypes(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    largest = FORMS[dtype].largest
    optimizer = owning(torch.tensor([largest, -largest, 0.0], dtype=dtype, device=target.device))
    started(target).step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


@contract("AMP-SCALE-051")
@ROUTES
def test_one_optimizer_step(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(torch.ones((), device=target.device))
    scaler = started(target)
    for count in range(1, 4):
        give(optimizer, 1.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        case.equal(f"calls of optimizer.step after {count} iterations", len(optimizer.calls), count)


@contract("AMP-SCALE-052")
@EACH_NON_FINITE
@pytest.mark.parametrize("later", [0.0, 1.0], ids=["zeroed", "replaced"])
def test_skip_stands(case: Case, target: Target, bad: float, later: float) -> None:
    scaler = started(target)
    optimizer = owning(torch.tensor([1.0, bad], device=target.device))
    scaler.unscale_(optimizer)
    give(optimizer, later)
    expect_skip(case, scaler, optimizer, f"{bad} found by unscale_, then {later}")
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)
