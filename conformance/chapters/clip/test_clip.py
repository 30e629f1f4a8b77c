"""Clipping: gradients clipped after unscale_ are those of fp32 training, and a bad one still skips the step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import departures, snapshot
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...workloads.linear_loss import Slopes, spoilt
from .reference import U, clamped, clipped, norm_bound, relative_distance, total_norm

NON_FINITE = {"inf": math.inf, "minus-inf": -math.inf, "nan": math.nan}
BAD = pytest.mark.parametrize(
    "bad",
    [pytest.param(math.inf, id="inf"), pytest.param(math.nan, id="nan"), deep("standard", -math.inf, id="minus-inf")],
)
NORMS = pytest.mark.parametrize(
    "norm_type",
    [
        *(pytest.param(p, id=name) for name, p in {"2": 2.0, "inf": math.inf}.items()),
        *(deep("standard", p, id=name) for name, p in {"1": 1, "half": 0.5, "3": 3.0, "named-inf": "inf"}.items()),
    ],
)
FOREACH = pytest.mark.parametrize(
    "foreach",
    [pytest.param(None, id="auto"), pytest.param(False, id="for-loop"), deep("standard", True, id="foreach")],
)
OPTIMIZERS = pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
SCALES = (2.0**16, 2.0**-4, 2.0**40)


def workload(
    case: Case, target: Target, rng: torch.Generator, foreach: bool | None = None, *, fused: bool = False
) -> Slopes:
    """Parameters with chosen gradients, or the verdict that this device has no foreach, or no fused, kernels."""
    slopes = Slopes.make("dense", target.device, rng)
    if target.device_type not in ("cpu", "cuda") and (foreach or fused):
        trial = slopes.copy()
        try:
            backward(trial, trial.draw(rng))
            torch.nn.utils.clip_grad_norm_(trial.parameters, 1.0, foreach=foreach)
            made(trial, fused).step()
        except RuntimeError as error:
            case.unsupported(str(error))
    return slopes


def backward(slopes: Slopes, slope: list[torch.Tensor], scaler: torch.amp.GradScaler | None = None) -> None:
    """Set the gradients to the slopes, times the scale if there is a scaler."""
    for parameter in slopes.parameters:
        parameter.grad = None
    loss = slopes.loss(slope)
    (loss if scaler is None else scaler.scale(loss)).backward()


def made(slopes: Slopes, fused: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Adam over the workload's parameters."""
    return torch.optim.Adam(slopes.groups(), lr=0.25, fused=fused, **options)


def scaler_for(target: Target, scale: float = 65536.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(target.device_type, init_scale=scale)


def grads(slopes: Slopes) -> list[torch.Tensor]:
    """Copies of the gradients of the moving parameters."""
    return [parameter.grad.detach().clone() for parameter in slopes.moving if parameter.grad is not None]


def all_identical(case: Case, what: str, seen: list[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        case.identical(f"{what}, tensor {number}", ours, theirs)


# After unscale_


@contract("AMP-CLIP-001")
@NORMS
@FOREACH
def test_clipped_as_in_fp32(
    case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None
) -> None:
    for scale in SCALES:
        scaled = workload(case, target, rng, foreach)
        plain = scaled.copy()
        slope = scaled.draw(rng)
        max_norm = total_norm(slope, float(norm_type)) / 4
        optimizer, scaler = made(scaled), scaler_for(target, scale)
        backward(scaled, slope, scaler)
        backward(plain, slope)
        scaler.unscale_(optimizer)
        norms = [
            torch.nn.utils.clip_grad_norm_(one.parameters, max_norm, norm_type=norm_type, foreach=foreach)
            for one in (scaled, plain)
        ]
        all_identical(case, f"clipped gradient at scale {scale:g}, against fp32", grads(scaled), grads(plain))
        case.identical(f"returned norm at scale {scale:g}, against fp32", *norms)
    shrunk = [not torch.equal(now, then) for now, then in zip(grads(scaled), slope, strict=True)]
    case.equal("control: gradients that clipping changed", shrunk, [True] * len(slope))


@contract("AMP-CLIP-002")
@NORMS
@FOREACH
def test_returned_norm(case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None) -> None:
    for scale in SCALES:
        slopes = workload(case, target, rng, foreach)
        slope = slopes.draw(rng)
        expected = total_norm(slope, float(norm_type))
        optimizer, scaler = made(slopes), scaler_for(target, scale)
        for share in (0.25, 4.0):
            backward(slopes, slope, scaler)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(
                slopes.parameters, share * expected, norm_type=norm_type, foreach=foreach
            )
            scaler.step(optimizer)
            scaler.update()
            error = abs(float(norm) - expected) / expected
            bound = norm_bound(slope, float(norm_type))
            case.at_most(f"error of the norm at scale {scale:g}, max_norm {share} of it", error, bound, "relative")
    case.equal("dtype, shape and device type", (norm.dtype, norm.shape, norm.device.type), _scalar(target))


@contract("AMP-CLIP-003")
@NORMS
@FOREACH
@pytest.mark.parametrize("share", [0.25, deep("standard", 1e-4), deep("standard", 0.999)], ids=str)
def test_clipped_values(
    case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None, share: float
) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = slopes.draw(rng)
    norm = total_norm(slope, float(norm_type))
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, share * norm, norm_type=norm_type, foreach=foreach)
    # The coefficient: an addition, a division and the norm's own error; then one multiplication.
    bound = norm_bound(slope, float(norm_type)) + 4 * U
    exact = clipped(slope, share * norm, norm)
    case.at_most("error of a clipped gradient", relative_distance(grads(slopes), exact), bound, "relative")
    left = total_norm(grads(slopes), float(norm_type)) / (share * norm)
    case.between("norm of the clipped gradients, of max_norm", left, 1 - bound - 1e-6 / norm, 1 + bound)


@contract("AMP-CLIP-004")
@NORMS
@FOREACH
def test_below_the_threshold(
    case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None
) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = slopes.draw(rng)
    norm = total_norm(slope, float(norm_type))
    optimizer, scaler = made(slopes), scaler_for(target)
    for max_norm in (1.001 * norm, 1000 * norm, math.inf):
        backward(slopes, slope, scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(slopes.parameters, max_norm, norm_type=norm_type, foreach=foreach)
        all_identical(case, f"gradient with max_norm {max_norm / norm:g} of the norm", grads(slopes), slope)
        scaler.update()
    nothing = [torch.zeros_like(part) for part in slope]
    backward(slopes, nothing, scaler)
    scaler.unscale_(optimizer)
    seen = torch.nn.utils.clip_grad_norm_(slopes.parameters, 1.0, norm_type=norm_type, foreach=foreach)
    all_identical(case, "zero gradient", grads(slopes), nothing)
    case.equal("norm of zero gradients", float(seen), 0.0)


@contract("AMP-CLIP-005")
@FOREACH
@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-7], ids=str)
def test_tiny_norms(case: Case, target: Target, rng: torch.Generator, foreach: bool | None, size: float) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = slopes.draw(rng)
    slope = [part * (size / total_norm(slope, 2.0)) for part in slope]
    norm = total_norm(slope, 2.0)
    optimizer, scaler = made(slopes), scaler_for(target, 2.0**40)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, size, foreach=foreach)
    bound = norm_bound(slope, 2.0) + 4 * U
    case.at_most(
        "error of a clipped gradient against max_norm / (norm + 1e-6)",
        relative_distance(grads(slopes), clipped(slope, size, norm)),
        bound,
        "relative",
    )


@contract("AMP-CLIP-005")
@FOREACH
@pytest.mark.parametrize("max_norm", [0.0, 1.0], ids=["zero", "one"])
def test_zero_gradients(
    case: Case, target: Target, rng: torch.Generator, foreach: bool | None, max_norm: float
) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = [torch.zeros_like(part) for part in slopes.draw(rng)]
    backward(slopes, slope, scaler_for(target, 1.0))
    norm = torch.nn.utils.clip_grad_norm_(slopes.parameters, max_norm, foreach=foreach)
    case.equal("norm of zero gradients", float(norm), 0.0)
    all_identical(case, "zero gradient", grads(slopes), slope)


@contract("AMP-CLIP-006")
@FOREACH
def test_in_place(case: Case, target: Target, rng: torch.Generator, foreach: bool | None) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, slopes.draw(rng), scaler)
    before = snapshot(optimizer)
    tensors = [parameter.grad for parameter in slopes.parameters]
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(slopes.parameters, 0.5, foreach=foreach)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.01, foreach=foreach)
    after = [parameter.grad for parameter in slopes.parameters]
    kept = [now is then for now, then in zip(after, tensors, strict=True)]
    case.equal("gradients that are the same tensors as before", kept, [True] * len(kept))
    case.equal("gradient of the parameter that had none", after[-1], None)
    case.equal("what clipping changed in parameters and state", departures(snapshot(optimizer), before), [])
    case.equal("norm requires grad", norm.requires_grad, False)
    case.equal("gradients require grad", [one.requires_grad for one in after if one is not None], [False] * 4)


@contract("AMP-CLIP-007")
@pytest.mark.parametrize("form", ["list", "tuple", "generator", "iterator", "module"])
def test_collections_of_parameters(case: Case, target: Target, rng: torch.Generator, form: str) -> None:
    slopes = workload(case, target, rng)
    slope = slopes.draw(rng)
    optimizer, scaler = made(slopes), scaler_for(target)
    forms: dict[str, Callable[[], Any]] = {
        "list": lambda: list(slopes.parameters),
        "tuple": lambda: tuple(slopes.parameters),
        "generator": lambda: (parameter for parameter in slopes.parameters),
        "iterator": lambda: iter(slopes.parameters),
        "module": lambda: torch.nn.ParameterList(slopes.parameters).parameters(),
    }
    norm = total_norm(slope, 2.0)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    seen = float(torch.nn.utils.clip_grad_norm_(forms[form](), norm / 4))
    bound = norm_bound(slope, 2.0) + 4 * U
    case.at_most("error of the norm", abs(seen - norm) / norm, bound, "relative")
    exact = clipped(slope, norm / 4, norm)
    case.at_most("error of a clipped gradient", relative_distance(grads(slopes), exact), bound, "relative")
    scaler.update()
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(forms[form](), 0.5)
    all_identical(case, "gradient clipped by value", grads(slopes), clamped(slope, 0.5))


@contract("AMP-CLIP-008")
@FOREACH
def test_one_tensor(case: Case, target: Target, rng: torch.Generator, foreach: bool | None) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = slopes.draw(rng)
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    norm = total_norm(slope[:1], 2.0)
    seen = float(torch.nn.utils.clip_grad_norm_(slopes.parameters[0], norm / 2, foreach=foreach))
    bound = norm_bound(slope[:1], 2.0) + 4 * U
    case.at_most("error of the norm of the one tensor", abs(seen - norm) / norm, bound, "relative")
    exact = clipped(slope[:1], norm / 2, norm)
    case.at_most("error of its gradient", relative_distance(grads(slopes)[:1], exact), bound, "relative")
    torch.nn.utils.clip_grad_value_(slopes.parameters[1], 0.5, foreach=foreach)
    expected = [*clamped(slope[1:2], 0.5), *slope[2:]]
    all_identical(case, "gradient of the others (the first of them clipped by value)", grads(slopes)[1:], expected)


@contract("AMP-CLIP-009")
def test_nothing_to_clip(case: Case, target: Target) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device=target.device)) for _ in range(2)]
    for name, given in {"no parameter": [], "no gradient": parameters}.items():
        case.equal(f"norm with {name}", float(torch.nn.utils.clip_grad_norm_(given, 1.0)), 0.0)
    case.equal("gradients afterwards", [parameter.grad for parameter in parameters], [None, None])


@contract("AMP-CLIP-010")
@pytest.mark.parametrize("tensors", [130, deep("standard", 1), deep("standard", 400)])
@pytest.mark.parametrize("norm_type", [2.0, deep("standard", 1.0), deep("standard", math.inf)], ids=str)
def test_many_tensors(case: Case, target: Target, rng: torch.Generator, tensors: int, norm_type: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 + number % 9, device=target.device)) for number in range(tensors)]
    slope = [torch.randn(len(parameter), generator=rng).to(target.device) for parameter in parameters]
    optimizer, scaler = torch.optim.SGD(parameters), scaler_for(target)
    scaler.scale(torch.stack([(p * s).sum() for p, s in zip(parameters, slope, strict=True)]).sum()).backward()
    scaler.unscale_(optimizer)
    norm = total_norm(slope, norm_type)
    seen = float(torch.nn.utils.clip_grad_norm_(parameters, norm / 2, norm_type))
    bound = norm_bound(slope, norm_type) + 4 * U
    case.at_most("error of the norm", abs(seen - norm) / norm, bound, "relative")
    after = [parameter.grad for parameter in parameters if parameter.grad is not None]
    exact = clipped(slope, norm / 2, norm)
    case.at_most("error of a clipped gradient", relative_distance(after, exact), bound, "relative")


@contract("AMP-CLIP-011")
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=str)
@FOREACH
def test_mixed_dtypes(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, norm_type: float, foreach: bool | None
) -> None:
    workload(case, target, rng, foreach)
    units = {torch.float32: U, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
    parameters = []
    for dtype in (torch.float32, amp_dtype, torch.float32):
        parameter = torch.nn.Parameter(torch.zeros(33, dtype=dtype, device=target.device))
        parameter.grad = torch.randn(33, generator=rng).to(target.device, dtype)
        parameters.append(parameter)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = total_norm(before, norm_type)
    seen = float(torch.nn.utils.clip_grad_norm_(parameters, norm / 2, norm_type, foreach=foreach))
    bound = norm_bound(before, norm_type, units[amp_dtype])
    case.at_most("error of the norm", abs(seen - norm) / norm, bound, "relative")
    for parameter, exact in zip(parameters, clipped(before, norm / 2, norm), strict=True):
        case.equal("dtype of the clipped gradient", parameter.grad.dtype, parameter.dtype)
        error = relative_distance([parameter.grad], [exact])
        # The coefficient may be rounded to the gradient's type before the product is.
        limit = bound + 4 * U + 2 * units[parameter.dtype]
        case.at_most(f"error of a clipped {parameter.dtype} gradient", error, limit, "relative")


# The wrong order


@contract("AMP-CLIP-020")
@NORMS
@pytest.mark.parametrize("scale", [4.0, 65536.0], ids=["4", "65536"])
def test_norm_before_unscale(case: Case, target: Target, rng: torch.Generator, norm_type: Any, scale: float) -> None:
    slopes = workload(case, target, rng)
    plain = slopes.copy()
    slope = slopes.draw(rng)
    scaler = scaler_for(target, scale)
    backward(slopes, slope, scaler)
    backward(plain, slope)
    norms = [float(torch.nn.utils.clip_grad_norm_(one.parameters, math.inf, norm_type)) for one in (slopes, plain)]
    expected = scale * total_norm(slope, float(norm_type))
    error = abs(norms[0] - expected) / expected
    case.at_most("distance of the norm from scale * norm", error, norm_bound(slope, float(norm_type)), "relative")
    case.at_least("control: ratio to the norm of fp32", norms[0] / norms[1], scale / 2)


@contract("AMP-CLIP-021")
@OPTIMIZERS
@pytest.mark.parametrize("share", [0.25, 2.0], ids=["above-threshold", "below-threshold"])
def test_gradients_clipped_before_unscale(
    case: Case, target: Target, rng: torch.Generator, fused: bool, share: float
) -> None:
    slopes = workload(case, target, rng, fused=fused)
    slope = slopes.draw(rng)
    norm, scale = total_norm(slope, 2.0), 1024.0
    optimizer, scaler = made(slopes, fused), scaler_for(target, scale)
    backward(slopes, slope, scaler)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, share * norm)
    scaler.step(optimizer)
    wrong = [part / scale for part in clipped([part * scale for part in slope], share * norm, scale * norm)]
    error = relative_distance(grads(slopes), wrong)
    case.at_most("distance from the gradients that arithmetic predicts", error, norm_bound(slope, 2.0) + 4 * U)
    right = total_norm(clipped(slope, share * norm, norm), 2.0)
    seen = right / total_norm(grads(slopes), 2.0)
    case.between("how many times too small they are", seen / (scale / max(share, 1.0)), 0.999, 1.001)


@contract("AMP-CLIP-022")
def test_values_clipped_before_unscale(case: Case, target: Target, rng: torch.Generator) -> None:
    slopes = workload(case, target, rng)
    slope = slopes.draw(rng)
    optimizer, scaler = made(slopes), scaler_for(target, 1024.0)
    backward(slopes, slope, scaler)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5)
    scaler.step(optimizer)
    all_identical(case, "gradient, against one clamped to value / scale", grads(slopes), clamped(slope, 0.5 / 1024))


# Inf and NaN


@contract("AMP-CLIP-030")
@BAD
@OPTIMIZERS
@pytest.mark.parametrize(
    "clip",
    ["norm", "value", *(deep("standard", name) for name in ("norm-inf", "norm-1", "norm-for-loop", "value-for-loop"))],
)
def test_bad_gradients_still_skip(
    case: Case, target: Target, rng: torch.Generator, bad: float, fused: bool, clip: str
) -> None:
    clips: dict[str, Callable[[Any], Any]] = {
        "norm": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0),
        "norm-inf": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, math.inf),
        "norm-1": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, 1.0),
        "norm-for-loop": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, foreach=False),
        "value": lambda given: torch.nn.utils.clip_grad_value_(given, 1.0),
        "value-for-loop": lambda given: torch.nn.utils.clip_grad_value_(given, 1.0, foreach=False),
    }
    slopes = workload(case, target, rng, fused=fused)
    optimizer, scaler = made(slopes, fused, weight_decay=0.125), scaler_for(target)
    clean = slopes.draw(rng)
    backward(slopes, clean, scaler)
    scaler.step(optimizer)
    scaler.update()
    for place in ("first", "last"):
        before, scale = snapshot(optimizer), scaler.get_scale()
        backward(slopes, spoilt(clean, place, bad), scaler)
        scaler.unscale_(optimizer)
        clips[clip](slopes.parameters)
        answer = scaler.step(optimizer)
        scaler.update()
        case.equal(f"what changed, bad value {place}", departures(snapshot(optimizer), before), [])
        case.equal("what step() returned", answer, None)
        case.equal("scale after update()", scaler.get_scale(), scale / 2)
    backward(slopes, clean, scaler)
    scaler.unscale_(optimizer)
    clips[clip](slopes.parameters)
    scaler.step(optimizer)
    case.true("control: a clean step with the same clipping steps", bool(departures(snapshot(optimizer), before)))


@contract("AMP-CLIP-031")
@OPTIMIZERS
def test_finite_after_clipping(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    optimizer, scaler = made(slopes, fused), scaler_for(target)
    clean = slopes.draw(rng)
    backward(slopes, clean, scaler)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(optimizer)
    backward(slopes, spoilt(clean, "last", math.inf), scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 1.0)
    case.equal(
        "every gradient is finite after clipping", all(bool(one.isfinite().all()) for one in grads(slopes)), True
    )
    scaler.step(optimizer)
    scaler.update()
    case.equal("what the step changed all the same", departures(snapshot(optimizer), before), [])
    case.equal("scale after update()", scaler.get_scale(), 32768.0)


@contract("AMP-CLIP-032")
@BAD
@NORMS
@FOREACH
def test_error_if_nonfinite(
    case: Case, target: Target, rng: torch.Generator, bad: float, norm_type: Any, foreach: bool | None
) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, spoilt(slopes.draw(rng), "last", bad), scaler)
    scaler.unscale_(optimizer)
    before = grads(slopes)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, slopes.parameters, 1.0, norm_type, foreach=foreach)
    case.raises("clipping", RuntimeError, functools.partial(clip, error_if_nonfinite=True), "non-finite")
    all_identical(case, "gradient after the refusal", grads(slopes), before)
    case.equal("norm is finite without the option", math.isfinite(float(clip())), False)
    scaler.update()
    backward(slopes, slopes.draw(rng), scaler)
    scaler.unscale_(optimizer)
    norm = float(clip(error_if_nonfinite=True))
    case.equal("control: norm of clean gradients is finite", math.isfinite(norm), True)


@contract("AMP-CLIP-033")
@OPTIMIZERS
def test_training_through_bad_gradients(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = made(slopes, fused), made(plain, fused), scaler_for(target)
    for bad in (None, math.inf, None, math.nan, -math.inf, None):
        slope = slopes.draw(rng)
        backward(slopes, slope if bad is None else spoilt(slope, "first", bad), scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(slopes.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if bad is None:
            backward(plain, slope)
            torch.nn.utils.clip_grad_norm_(plain.parameters, 1.0)
            control.step()
    case.equal("what differs from clipped fp32 training", departures(snapshot(optimizer), snapshot(control)), [])
    case.equal("scale after three skips", scaler.get_scale(), 8192.0)


@contract("AMP-CLIP-034")
@BAD
@FOREACH
def test_what_clipping_leaves_of_bad_gradients(
    case: Case, target: Target, rng: torch.Generator, bad: float, foreach: bool | None
) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = made(slopes), scaler_for(target)
    slope = spoilt(slopes.draw(rng), "last", bad)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, 1.0, foreach=foreach)
    exact = [part.float().to(target.device) for part in clipped(slope, 1.0, abs(bad))]
    all_identical(case, f"gradient times 1 / {abs(bad)}", grads(slopes), exact)


# Some of the gradients


@contract("AMP-CLIP-040")
@OPTIMIZERS
@pytest.mark.parametrize("clipped_one", [0, 1])
def test_one_of_two_optimizers(case: Case, target: Target, rng: torch.Generator, fused: bool, clipped_one: int) -> None:
    slopes = [workload(case, target, rng, fused=fused) for _ in range(2)]
    twins = [one.copy() for one in slopes]
    optimizers = [made(one, fused) for one in slopes]
    controls = [made(one, fused) for one in twins]
    scaler = scaler_for(target)
    drawn = [one.draw(rng) for one in slopes]
    for one, twin, slope in zip(slopes, twins, drawn, strict=True):
        backward(one, slope, scaler)
        backward(twin, slope)
    scaler.unscale_(optimizers[clipped_one])
    for parameters in (slopes[clipped_one].parameters, twins[clipped_one].parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    still_scaled = [part * 65536.0 for part in drawn[1 - clipped_one]]
    all_identical(case, "other optimizer's gradient, still scaled", grads(slopes[1 - clipped_one]), still_scaled)
    for optimizer, control in zip(optimizers, controls, strict=True):
        scaler.step(optimizer)
        control.step()
    scaler.update()
    for number, (optimizer, control) in enumerate(zip(optimizers, controls, strict=True)):
        changed = departures(snapshot(optimizer), snapshot(control))
        case.equal(f"what differs from fp32 in optimizer {number}", changed, [])


@contract("AMP-CLIP-041")
@OPTIMIZERS
def test_one_group(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = made(slopes, fused), made(plain, fused), scaler_for(target)
    slope = slopes.draw(rng)
    backward(slopes, slope, scaler)
    backward(plain, slope)
    scaler.unscale_(optimizer)
    for one in (optimizer, control):
        torch.nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.5)
    all_identical(case, "gradient of the group that is not clipped", grads(slopes)[2:], slope[2:])
    scaler.step(optimizer)
    control.step()
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(control)), [])


# The norm apart from the clipping


@contract("AMP-CLIP-050")
@NORMS
@FOREACH
def test_norm_then_clip(case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None) -> None:
    first = workload(case, target, rng, foreach)
    second = first.copy()
    slope = first.draw(rng)
    scaler, optimizers = scaler_for(target), [made(one) for one in (first, second)]
    for one, optimizer in zip((first, second), optimizers, strict=True):
        backward(one, slope, scaler)
        scaler.unscale_(optimizer)
    whole = torch.nn.utils.clip_grad_norm_(first.parameters, 1.0, norm_type, foreach=foreach)
    norm = torch.nn.utils.get_total_norm(
        (one.grad for one in second.moving),
        norm_type,
        foreach=foreach,
    )
    all_identical(case, "gradient after get_total_norm alone", grads(second), slope)
    torch.nn.utils.clip_grads_with_norm_(second.parameters, 1.0, norm, foreach=foreach)
    case.identical("norm, against clip_grad_norm_", norm, whole)
    all_identical(case, "clipped gradient, against clip_grad_norm_", grads(second), grads(first))


@contract("AMP-CLIP-051")
@FOREACH
@pytest.mark.parametrize("factor", [2.0, 0.5, 0.01], ids=str)
def test_norm_of_ones_own(
    case: Case, target: Target, rng: torch.Generator, foreach: bool | None, factor: float
) -> None:
    slopes = workload(case, target, rng, foreach)
    slope = slopes.draw(rng)
    norm = total_norm(slope, 2.0)
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    given = torch.tensor(factor * norm, device=target.device)
    torch.nn.utils.clip_grads_with_norm_(slopes.parameters, norm / 8, given, foreach=foreach)
    exact = clipped(slope, norm / 8, factor * norm)
    case.at_most("error of a clipped gradient", relative_distance(grads(slopes), exact), 6 * U, "relative")


# By value


@contract("AMP-CLIP-060")
@FOREACH
@pytest.mark.parametrize("value", [0.5, deep("standard", 1), deep("standard", 1e-3)], ids=str)
def test_clipped_by_value(case: Case, target: Target, rng: torch.Generator, foreach: bool | None, value: float) -> None:
    for scale in SCALES:
        slopes = workload(case, target, rng, foreach)
        slope = slopes.draw(rng)
        slope[0].view(-1)[:4] = torch.tensor([value, -value, 0.0, -0.0])
        optimizer, scaler = made(slopes), scaler_for(target, scale)
        backward(slopes, slope, scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(slopes.parameters, value, foreach=foreach)
        expected = clamped(slope, float(torch.tensor(value)))
        all_identical(case, f"gradient at scale {scale:g}, against plain Python", grads(slopes), expected)
    changed = [not torch.equal(now, then) for now, then in zip(grads(slopes), slope, strict=True)]
    case.true("control: clipping changed something", any(changed), changed)


@contract("AMP-CLIP-061")
@FOREACH
def test_bad_values(case: Case, target: Target, rng: torch.Generator, foreach: bool | None) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = made(slopes), scaler_for(target)
    slope = slopes.draw(rng)
    slope[0].view(-1)[:3] = torch.tensor(list(NON_FINITE.values()))
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5, foreach=foreach)
    all_identical(case, "gradient, against plain Python", grads(slopes), clamped(slope, 0.5))


# Whole steps


@contract("AMP-CLIP-070")
@OPTIMIZERS
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("enabled", [True, False], ids=["scaler", "disabled-scaler"])
def test_whole_step(case: Case, target: Target, rng: torch.Generator, fused: bool, clip: str, enabled: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control = made(slopes, fused), made(plain, fused)
    scaler = torch.amp.GradScaler(target.device_type, enabled=enabled)
    clips: dict[str, Callable[[Any], Any]] = {
        "norm": lambda given: torch.nn.utils.clip_grad_norm_(given, 0.75),
        "value": lambda given: torch.nn.utils.clip_grad_value_(given, 0.5),
    }
    for number in range(3):
        slope = slopes.draw(rng)
        backward(slopes, slope, scaler)
        backward(plain, slope)
        scaler.unscale_(optimizer)
        for one in (slopes, plain):
            clips[clip](one.parameters)
        scaler.step(optimizer)
        scaler.update()
        control.step()
        changed = departures(snapshot(optimizer), snapshot(control))
        case.equal(f"what differs from fp32 after step {number + 1}", changed, [])
        all_identical(case, f"gradient after step {number + 1}", grads(slopes), grads(plain))


@contract("AMP-CLIP-071")
@OPTIMIZERS
def test_whole_amp_step(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, fused: bool) -> None:
    """Small integers: in fp16 and bf16 alike every product, sum and scaled gradient of the layer is exact."""

    def integers(reach: int, *shape: int) -> torch.Tensor:
        return torch.randint(-reach, reach + 1, shape, generator=rng).float().to(target.device)

    inputs, weights, targets = integers(3, 6, 9), integers(2, 5, 9), integers(2, 6, 5)
    layers = [torch.nn.Linear(9, 5, bias=False).to(target.device) for _ in range(2)]
    for layer in layers:
        layer.weight.data.copy_(weights)
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.25, fused=fused) for layer in layers]
    scaler = scaler_for(target, 256.0)
    dtypes = []
    for region, (layer, optimizer) in zip((True, False), zip(layers, optimizers, strict=True), strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            with target.autocast(amp_dtype, enabled=region):
                outputs = layer(inputs)
                loss = (outputs.float() * targets).sum()
            (scaler.scale(loss) if region else loss).backward()
            if region:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            if region:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        dtypes.append(outputs.dtype)
    case.equal("control: dtypes of the outputs, AMP and fp32", dtypes, [amp_dtype, torch.float32])
    case.identical("clipped gradient", layers[0].weight.grad, layers[1].weight.grad)
    case.identical("weight", layers[0].weight, layers[1].weight)
    exact = clipped([targets.T @ inputs], 1.0, total_norm([targets.T @ inputs], 2.0))
    error = relative_distance([layers[0].weight.grad], exact)
    case.at_most("error of the clipped gradient", error, norm_bound(exact, 2.0) + 4 * U, "relative")


@contract("AMP-CLIP-072")
@OPTIMIZERS
def test_accumulated(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = made(slopes, fused), made(plain, fused), scaler_for(target)
    parts = [slopes.draw(rng) for _ in range(3)]
    for part in parts:
        scaler.scale(slopes.loss(part)).backward()
        plain.loss(part).backward()
    scaler.unscale_(optimizer)
    for one in (slopes, plain):
        torch.nn.utils.clip_grad_norm_(one.parameters, 0.5)
    all_identical(case, "clipped sum of gradients", grads(slopes), grads(plain))
    scaler.step(optimizer)
    control.step()
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(control)), [])


@contract("AMP-CLIP-073")
@FOREACH
def test_clipping_inside_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, foreach: bool | None
) -> None:
    inside = workload(case, target, rng, foreach)
    outside = inside.copy()
    slope = inside.draw(rng)
    for one in (inside, outside):
        backward(one, slope)
    with target.autocast(amp_dtype):
        norm = torch.nn.utils.clip_grad_norm_(inside.parameters, 0.5, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(outside.parameters, 0.5, foreach=foreach)
    case.identical("norm, against outside the region", norm, expected)
    all_identical(case, "clipped gradient, against outside the region", grads(inside), grads(outside))


@contract("AMP-CLIP-074")
@FOREACH
def test_clipping_reads_nothing_back(case: Case, target: Target, rng: torch.Generator, foreach: bool | None) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = made(slopes), scaler_for(target)
    backward(slopes, slopes.draw(rng), scaler)
    with OpTrace() as trace:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(slopes.parameters, 0.5, foreach=foreach)
        torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5, foreach=foreach)
    case.equal("values read back to the host", counts.reads(trace.ops), 0)
    with trace:
        norm.item()
    case.equal("control: with one read", counts.reads(trace.ops), 1)


@contract("AMP-CLIP-080")
def test_deprecated_spelling(case: Case, target: Target, rng: torch.Generator) -> None:
    old = workload(case, target, rng)
    new = old.copy()
    slope = old.draw(rng)
    for one in (old, new):
        backward(one, slope)
    clip = functools.partial(torch.nn.utils.clip_grad_norm, old.parameters, 0.5)
    norm = case.warns("torch.nn.utils.clip_grad_norm", FutureWarning, clip, "clip_grad_norm_")
    case.identical("norm", norm, torch.nn.utils.clip_grad_norm_(new.parameters, 0.5))
    all_identical(case, "clipped gradient", grads(old), grads(new))


def _scalar(target: Target) -> tuple[torch.dtype, torch.Size, str]:
    return torch.float32, torch.Size([]), target.device_type
