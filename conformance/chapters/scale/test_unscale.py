"""Check that unscale_() divides every gradient by the scale once, exactly, in place and without synchronization."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.flags import held
from ...measure.storages import memory
from ...oracles.message_names import FP16
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...scaler import model as oracle
from ...workloads.third_party_optimizers import Ordinary, SelfScaling, owning, parameters_of
from .support import (
    EACH_NON_FINITE,
    LAYOUTS,
    ROUTES,
    expect_traced,
    expected_unscaled,
    iterate,
    sparse,
    started,
    tracker,
)

EXPONENTS = pytest.mark.parametrize(
    "exponent", [0, 16, *(deep("standard", k) for k in (1, 8, 24, 64)), *(deep("full", k) for k in (100, 111))]
)

# Scales whose reciprocal is not exact in fp32; 65537 and 1 + 2^-23 sit next to a power of two.
ODD_SCALES = (3.0, 65535.0, 65537.0, 1000.0, 0.1, 1 + 2**-23, 12345.678, 2.0**100 / 3)


def fp16_numbers() -> torch.Tensor:
    """Return every finite fp16 number, as fp32."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return numbers[numbers.isfinite()].float()


@contract("AMP-SCALE-020")
@EXPONENTS
def test_power_of_two_is_undone(case: Case, target: Target, exponent: int) -> None:
    # fp32 has room for 2**111 times fp16's largest number and, unscaled, for its smallest: every product is exact.
    numbers = fp16_numbers()
    gradient = (numbers * 2.0**exponent).to(target.device, copy=True)
    started(target, init_scale=2.0**exponent).unscale_(owning(gradient))
    case.identical("every finite fp16 number, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-020")
def test_large_gradients_are_unscaled(case: Case, target: Target, rng: torch.Generator) -> None:
    numbers = torch.randn(case.samples(quick=70_001, standard=300_001, full=3_000_001), generator=rng)
    gradient = (numbers * 65536).to(target.device, copy=True)
    started(target).unscale_(owning(gradient))
    case.identical("gradients, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-020")
def test_subnormal_results(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    numbers = torch.tensor([k * 2.0**-149 for k in (1, -1, 2, 3, 1023, -4095)])
    gradient = (numbers.double() * 65536).float().to(target.device, copy=True)
    started(target).unscale_(owning(gradient))
    case.identical("subnormal gradients, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-021")
@pytest.mark.parametrize(
    "scale", [*ODD_SCALES[:3], *(deep("standard", scale) for scale in ODD_SCALES[3:])], ids="{:g}".format
)
def test_any_scale(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    case.require_subnormals(target)
    case.require_arithmetic(target, torch.float64)
    numbers = torch.cat(
        [torch.randn(200, generator=rng) * 1000, torch.tensor([0.0, -0.0, 3e38, 2.0**-126, 5 * 2.0**-149])]
    )
    gradient = numbers.to(target.device, copy=True)
    started(target, init_scale=scale).unscale_(owning(gradient))
    expected = expected_unscaled(numbers, oracle.rounded(scale, oracle.FP32), gradient)
    case.identical("gradients over the scale, or times its rounded reciprocal", gradient, expected)


@contract("AMP-SCALE-022")
@ROUTES
def test_in_place(case: Case, target: Target, explicit: bool) -> None:
    gradient = torch.full((4,), 65536.0, device=target.device)
    optimizer = owning(gradient)
    place = memory(gradient)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)
    kept = parameters_of(optimizer)[0].grad
    case.true("the parameter's .grad is the same tensor", kept is gradient)
    case.equal("its storage", memory(kept) == place, True)
    case.identical("its numbers", gradient, torch.ones(4))


@contract("AMP-SCALE-023")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case: Case, target: Target, rng: torch.Generator, layout: str) -> None:
    numbers = LAYOUTS[layout](torch.randn(24, generator=rng))
    gradient = LAYOUTS[layout]((numbers * 65536).flatten().to(target.device, copy=True))
    base = gradient if gradient._base is None else gradient._base
    started(target).unscale_(owning(gradient))
    case.identical("gradient, scaled and unscaled", gradient, LAYOUTS[layout](numbers.flatten()))
    case.equal(
        "elements of the storage outside the gradient that changed",
        int((base.abs() < 7.0).sum()),
        int((gradient.abs() < 7.0).sum()),
    )


@contract("AMP-SCALE-023")
@pytest.mark.parametrize("tensors", [1, 2, 5, 131, deep("full", 500)])
def test_many_tensors(case: Case, target: Target, rng: torch.Generator, tensors: int) -> None:
    sizes = [(1, 2, 3, 7, 8, 9, 31, 33, 0, 1023, 4097)[index % 11] for index in range(tensors)]
    numbers = [torch.randn(size, generator=rng) for size in sizes]
    optimizer = owning(*((values * 65536).to(target.device, copy=True) for values in numbers))
    started(target).unscale_(optimizer)
    seen = torch.cat([parameter.grad for parameter in parameters_of(optimizer)])
    case.identical("gradients, scaled and unscaled", seen, torch.cat(numbers))


@contract("AMP-SCALE-023")
def test_parameter_groups(case: Case, target: Target) -> None:
    optimizer = owning(torch.full((3,), 65536.0, device=target.device))
    for size in (1, 5):
        parameter = torch.zeros(size, device=target.device, requires_grad=True)
        parameter.grad = torch.full((size,), size * 65536.0, device=target.device)
        optimizer.add_param_group({"params": [parameter]})
    started(target).unscale_(optimizer)
    seen = [parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients of three groups", seen, [[1.0] * 3, [1.0], [5.0] * 5])


GROUPS = ("usual", "without gradients", "empty", "of rate 0", "frozen in part", "frozen since backward", "bf16")


def group_of(kind: str, device: torch.device) -> dict[str, Any]:
    """Return a parameter group of two tensors whose gradients, where they have one, are 2**16."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    parameters = [torch.zeros(3, dtype=dtype, device=device, requires_grad=True) for _ in range(kind != "empty" and 2)]
    for parameter in parameters if kind != "without gradients" else []:
        parameter.grad = torch.full_like(parameter, 65536.0)
    if kind.startswith("frozen"):
        parameters[0].requires_grad_(False)
    if kind == "frozen in part":
        parameters[0].grad = None
    return {"params": parameters, **({"lr": 0.0} if kind == "of rate 0" else {})}


@contract("AMP-SCALE-023")
@pytest.mark.parametrize("kind", GROUPS)
@ROUTES
def test_groups_in_every_place(case: Case, target: Target, kind: str, explicit: bool) -> None:
    """Put a group of each kind first, in the middle and last among two others of every kind."""
    if kind == "bf16":
        case.require_arithmetic(target, torch.bfloat16)
    others = [other for other in GROUPS if other != "bf16"]
    kinds = [(*pair[:place], kind, *pair[place:]) for pair in itertools.product(others, repeat=2) for place in range(3)]
    wrong, seen = [], 0
    for order in kinds:
        optimizer = torch.optim.SGD([group_of(each, target.device) for each in order], lr=0.25)
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if not gradients:
            continue
        scaler = started(target)
        (scaler.unscale_ if explicit else scaler.step)(optimizer)
        seen += len(gradients)
        if not all(bool((gradient == 1).all()) for gradient in gradients):
            wrong.append(f"{', '.join(order)}: {[gradient[0].item() for gradient in gradients]}")
    case.at_least("gradients seen", seen, 1)
    case.equal("groups whose gradients are not unscaled once", wrong[:3], [])


@contract("AMP-SCALE-044")
@pytest.mark.parametrize("kind", GROUPS[3:])
def test_an_inf_in_any_group(case: Case, target: Target, kind: str) -> None:
    """One inf in a group of each kind skips the step, wherever the group is."""
    if kind == "bf16":
        case.require_arithmetic(target, torch.bfloat16)
    wrong = []
    for other, place in itertools.product(("usual", "without gradients", "empty"), range(3)):
        order = [other, other]
        order.insert(place, kind)
        optimizer = torch.optim.SGD([group_of(each, target.device) for each in order], lr=0.25)
        optimizer.param_groups[place]["params"][1].grad[-1] = math.inf
        scaler = started(target)
        scaler.step(optimizer)
        scaler.update()
        moved = [number for number, each in enumerate(parameters_of(optimizer)) if bool((each != 0).any())]
        if moved or scaler.get_scale() != 32768.0:
            wrong.append(f"{', '.join(order)}: scale {scaler.get_scale()}, parameters that moved: {moved}")
    case.equal("orders in which the step was taken", wrong[:3], [])


@contract("AMP-SCALE-021")
@pytest.mark.parametrize(
    "scale", [3.0, 65535.0, *(deep("standard", scale) for scale in ODD_SCALES[2:])], ids="{:g}".format
)
def test_any_default_dtype(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    case.require_arithmetic(target, torch.float64)
    numbers = torch.randn(67, generator=rng) * 1000
    kept = oracle.rounded(scale, oracle.FP32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        gradient = numbers.to(target.device, copy=True)
        optimizer = owning(gradient)
        with held("torch.get_default_dtype", dtype):
            scaler = started(target, init_scale=scale)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        what = f"gradients over the scale, or times its rounded reciprocal, default dtype {dtype}"
        case.identical(what, gradient, expected_unscaled(numbers, kept, gradient))
        case.equal(f"the scale, default dtype {dtype}", scaler.get_scale(), kept)


@contract("AMP-SCALE-023")
def test_gradients_with_a_graph(case: Case, target: Target) -> None:
    weight = torch.tensor(3.0, device=target.device, requires_grad=True)
    scaler = torch.amp.GradScaler(target.device_type)
    (weight.grad,) = torch.autograd.grad(scaler.scale(weight**3), weight, create_graph=True)
    scaler.unscale_(Ordinary([weight]))
    case.equal("a gradient made with create_graph=True", weight.grad.item(), 27.0)


@contract("AMP-SCALE-023")
@ROUTES
def test_frozen_since_backward(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(*(torch.full((2,), 131072.0, device=target.device) for _ in range(2)))
    frozen = parameters_of(optimizer)[0].requires_grad_(False)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
        case.equal("gradient of a frozen parameter after unscale_", frozen.grad.tolist(), [2.0, 2.0])
    scaler.step(optimizer)
    seen = [parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients after step()", seen, [[2.0, 2.0], [2.0, 2.0]])
    scaler.update()
    frozen.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    case.equal("the scale after inf in a frozen parameter's gradient", scaler.get_scale(), 32768.0)


@contract("AMP-SCALE-024")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("scale", [65536.0, 3.0], ids="{:g}".format)
def test_dtypes(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype, scale: float) -> None:
    case.require_arithmetic(target, dtype, torch.float64)
    numbers = (torch.randn(67, generator=rng) * 1000).to(dtype)
    gradient = numbers.to(target.device, copy=True)
    started(target, init_scale=scale).unscale_(owning(gradient))
    case.identical("gradient", gradient, expected_unscaled(numbers, scale, gradient))


@contract("AMP-SCALE-024")
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=["wide", "with-bf16"])
def test_mixed_dtypes(case: Case, target: Target, rng: torch.Generator, narrow: torch.dtype) -> None:
    dtypes = (torch.float32, narrow, torch.float64, torch.float32, narrow)
    case.require_arithmetic(target, *dtypes)
    numbers = [torch.randn(9, generator=rng).to(dtype) for dtype in dtypes]
    optimizer = owning(*((values * 1024).to(target.device, copy=True) for values in numbers))
    started(target, init_scale=1024.0).unscale_(optimizer)
    for parameter, values in zip(parameters_of(optimizer), numbers, strict=True):
        case.identical("gradient, scaled and unscaled", parameter.grad, values)


@contract("AMP-SCALE-025")
@pytest.mark.parametrize("missing", [0, 1, 2], ids=["first", "middle", "last"])
def test_parameters_without_gradients(case: Case, target: Target, missing: int) -> None:
    optimizer = owning(*(torch.full((2,), 65536.0, device=target.device) for _ in range(3)))
    parameters_of(optimizer)[missing].grad = None
    scaler = started(target)
    scaler.unscale_(optimizer)
    seen = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients", seen, [None if index == missing else [1.0, 1.0] for index in range(3)])
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


@contract("AMP-SCALE-026")
@EACH_NON_FINITE
def test_unscale_touches_its_gradients_only(case: Case, target: Target, bad: float) -> None:
    scaler = started(target, growth_interval=5)
    iterate(scaler, owning(torch.ones((), device=target.device)))
    mine = owning(torch.tensor([131072.0, bad], device=target.device))
    other = owning(torch.tensor([3.0], device=target.device))
    with torch.no_grad():
        parameters_of(mine)[0].fill_(2.5)
    scaler.unscale_(mine)
    case.identical("the optimizer's parameters", parameters_of(mine)[0], torch.tensor([2.5, 2.5]))
    case.equal("the finite element next to the non-finite one", parameters_of(mine)[0].grad[0].item(), 2.0)
    case.identical("another optimizer's gradients", parameters_of(other)[0].grad, torch.tensor([3.0]))
    case.equal("calls of optimizer.step", (len(mine.calls), len(other.calls)), (0, 0))
    case.equal("the scale", scaler.get_scale(), 65536.0)
    case.equal("the growth tracker", tracker(scaler), 1)


OF_SPARSE = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)


@contract("AMP-SCALE-027")
@OF_SPARSE
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])
def test_sparse_gradients(case: Case, target: Target, coalesced: bool, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    optimizer = owning(
        torch.zeros(8, dtype=dtype, device=target.device), torch.full((2,), 65536.0, device=target.device)
    )
    first = parameters_of(optimizer)[0]
    first.grad = sparse([65536.0, -196608.0], dtype, target, coalesced=coalesced)
    scaler = started(target)
    scaler.unscale_(optimizer)
    expected = [1.0, -3.0, 0.0] if coalesced else [0.0, 0.0, -2.0]
    case.equal("the sparse gradient", first.grad.to_dense().tolist(), expected + [0.0] * 5)
    case.equal("still sparse", first.grad.is_sparse, True)
    case.equal("the dense gradient of the same optimizer", parameters_of(optimizer)[1].grad.tolist(), [1.0, 1.0])
    scaler.step(optimizer)
    case.equal("parameters after the step", first.tolist(), [-value for value in expected + [0.0] * 5])


@contract("AMP-SCALE-027")
@OF_SPARSE
def test_sparse_gradients_of_embeddings(case: Case, target: Target, dtype: torch.dtype) -> None:
    """Rows of an embedding, as backward leaves them: used twice, once, in no order and not at all."""
    case.require_arithmetic(target, dtype)
    for words in ([1, 1], [3, 0, 3, 3], [2], []):
        # Whole numbers: whether the values of a row are subtracted together or one by one is free.
        weight = torch.arange(10, dtype=dtype, device=target.device).view(5, 2)
        table = torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        before = table.weight.detach().clone()
        scaler = started(target)
        index = torch.tensor(words, dtype=torch.long, device=target.device)
        scaler.scale(table(index).sum(dtype=torch.float32)).backward()
        scaler.unscale_(optimizer)
        counted = torch.tensor([[float(words.count(row))] * 2 for row in range(5)], dtype=dtype, device=target.device)
        case.identical(f"words {words}: the gradient", table.weight.grad.to_dense(), counted)
        scaler.step(optimizer)
        case.identical(f"words {words}: the weight after the step", table.weight.detach(), before - counted)


@contract("AMP-SCALE-028")
@ROUTES
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_fp16_gradients(case: Case, target: Target, explicit: bool, place: int) -> None:
    case.require_arithmetic(target, torch.float16, torch.float64)
    dtypes = [torch.float32] * 3
    dtypes[place] = torch.float16
    optimizer = owning(*(torch.ones(2, dtype=dtype, device=target.device) for dtype in dtypes))
    scaler = started(target)
    call = scaler.unscale_ if explicit else scaler.step
    case.raises("fp16 gradients", ValueError, lambda: call(optimizer), names=(FP16,))
    case.equal("calls of optimizer.step", len(optimizer.calls), 0)
    control = owning(*(torch.ones(2, device=target.device) for _ in dtypes))
    scaler.step(control)
    case.equal("control: fp32 gradients step", len(control.calls), 1)


@contract("AMP-SCALE-028")
@ROUTES
def test_bf16_gradients(case: Case, target: Target, explicit: bool) -> None:
    case.require_arithmetic(target, torch.bfloat16)
    optimizer = owning(*(torch.ones(2, dtype=torch.bfloat16, device=target.device) for _ in range(3)))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


READ_BACK: dict[str, tuple[torch.dtype, ...]] = {
    "one": (torch.float32,),
    "many": (torch.float32,) * 5,
    "several-dtypes": (torch.float32, torch.float64),
}


@contract("AMP-SCALE-029")
@pytest.mark.parametrize("sparse_too", [False, True], ids=["dense", "sparse-too"])
@pytest.mark.parametrize("dtypes", READ_BACK.values(), ids=list(READ_BACK))
def test_unscale_reads_nothing_back(
    case: Case, target: Target, dtypes: tuple[torch.dtype, ...], sparse_too: bool
) -> None:
    case.require_arithmetic(target, *dtypes)
    scaler = started(target)
    gradients = [torch.full((2,), 65536.0, dtype=dtype, device=target.device) for dtype in dtypes]
    if sparse_too:
        gradients += [sparse([1.0, 2.0], torch.float32, target, coalesced=coalesced) for coalesced in (False, True)]
    optimizer = owning(*gradients)
    with OpTrace() as trace:
        scaler.unscale_(optimizer)
    case.equal("values that unscale_ copies to the host", counts.reads(trace.ops), 0)
    expect_traced(case, trace.ops)
    with OpTrace() as trace:
        gradients[0][0].item()
    case.equal("control: values that item copies to the host", counts.reads(trace.ops), 1)


@contract("AMP-SCALE-029", on="cuda")
def test_unscale_does_not_synchronise(case: Case, target: Target) -> None:
    scaler = started(target)
    optimizer = owning(torch.full((2,), 65536.0, device=target.device))
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        scaler.unscale_(optimizer)
        case.raises("control: item synchronizes", RuntimeError, parameters_of(optimizer)[0].grad[0].item)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    case.equal("gradients", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-030")
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100], ids=["smallest", "small"])
def test_overflow_in_unscaling(case: Case, target: Target, scale: float) -> None:
    scaler = started(target, init_scale=scale)
    control = owning(torch.full((2,), scale, device=target.device))
    scaler.step(control)
    case.equal("control: a gradient that fits", parameters_of(control)[0].tolist(), [-1.0, -1.0])
    optimizer = owning(torch.tensor([1e30, scale], device=target.device))
    scaler.step(optimizer)
    seen = parameters_of(optimizer)[0]
    case.true("parameters stay finite", bool(seen.isfinite().all()), seen.tolist())


@contract("AMP-SCALE-124")
def test_fp16_sparse_gradients_are_added_first(case: Case, target: Target) -> None:
    case.require_arithmetic(target, torch.float16)
    for values, found in (([40000.0, 40000.0], 1.0), ([20000.0, 20000.0], 0.0), ([1.0, math.inf], 1.0)):
        optimizer = owning(torch.zeros(8, dtype=torch.float16, device=target.device), kind=SelfScaling)
        parameters_of(optimizer)[0].grad = sparse(values, torch.float16, target, coalesced=False)
        scaler = started(target)
        scaler.step(optimizer)
        case.equal(f"the flag for {values} at one index", optimizer.received, [(65536.0, found)])
