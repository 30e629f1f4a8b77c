"""Check that gradients clipped after unscale_ equal those of fp32 training, by norm and by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from ...workloads.gradients import NON_FINITE
from .reference import U, clamped, clipped, norm_bound, relative_distance, total_norm
from .support import FOREACH, NORMS, adam_over, all_identical, backward, grads, scaler_for, workload

SCALES = (2.0**16, 2.0**-4, 2.0**40)


# By norm


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
        optimizer, scaler = adam_over(scaled), scaler_for(target, scale)
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
        optimizer, scaler = adam_over(slopes), scaler_for(target, scale)
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
    case.equal("dtype, shape and device type", (norm.dtype, norm.shape, norm.device.type), scalar_on(target))


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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
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
    optimizer, scaler = adam_over(slopes), scaler_for(target, 2.0**40)
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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
    backward(slopes, slopes.draw(rng), scaler)
    before = snapshot(optimizer)
    tensors = [parameter.grad for parameter in slopes.parameters]
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(slopes.parameters, 0.5, foreach=foreach)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.01, foreach=foreach)
    after = [parameter.grad for parameter in slopes.parameters]
    kept = [now is then for now, then in zip(after, tensors, strict=True)]
    case.equal("gradients that are still the same tensors", kept, [True] * len(kept))
    case.equal("gradient of the parameter without one", after[-1], None)
    case.equal("differences in parameters and state after clipping", differences(snapshot(optimizer), before), [])
    case.equal("norm requires grad", norm.requires_grad, False)
    case.equal("gradients require grad", [one.requires_grad for one in after if one is not None], [False] * 4)


@contract("AMP-CLIP-007")
@pytest.mark.parametrize("form", ["list", "tuple", "generator", "iterator", "module"])
def test_collections_of_parameters(case: Case, target: Target, rng: torch.Generator, form: str) -> None:
    slopes = workload(case, target, rng)
    slope = slopes.draw(rng)
    optimizer, scaler = adam_over(slopes), scaler_for(target)
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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
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


@contract("AMP-CLIP-008")
@FOREACH
def test_one_tensor_of_any_rank(case: Case, target: Target, foreach: bool | None) -> None:
    workload(case, target, torch.Generator(), foreach)
    for shape in ((), (1,), (3,), (2, 1), (2, 3, 1), (1, 2, 1, 2)):
        parameter = torch.nn.Parameter(torch.zeros(shape, device=target.device))
        parameter.grad = torch.full(shape, 4.0, device=target.device)
        norm = 4.0 * parameter.numel() ** 0.5
        seen = float(torch.nn.utils.clip_grad_norm_(parameter, norm / 4, foreach=foreach))
        case.at_most(f"error of the norm of one tensor of shape {shape}", abs(seen - norm) / norm, 8 * U, "relative")
        far = float((parameter.grad - 1.0).abs().max())
        case.at_most(f"error of the gradient of shape {shape} clipped by norm", far, 2.0**-18)  # norm + 1e-6
        torch.nn.utils.clip_grad_value_(parameter, 0.5, foreach=foreach)
        case.identical(
            f"gradient of shape {shape} clipped by value", parameter.grad, torch.full_like(parameter.grad, 0.5)
        )


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


# get_total_norm and clip_grads_with_norm_


@contract("AMP-CLIP-050")
@NORMS
@FOREACH
def test_norm_then_clip(case: Case, target: Target, rng: torch.Generator, norm_type: Any, foreach: bool | None) -> None:
    first = workload(case, target, rng, foreach)
    second = first.copy()
    slope = first.draw(rng)
    scaler, optimizers = scaler_for(target), [adam_over(one) for one in (first, second)]
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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
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
        optimizer, scaler = adam_over(slopes), scaler_for(target, scale)
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
    optimizer, scaler = adam_over(slopes), scaler_for(target)
    slope = slopes.draw(rng)
    slope[0].view(-1)[:3] = torch.tensor(list(NON_FINITE.values()))
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5, foreach=foreach)
    all_identical(case, "gradient, against plain Python", grads(slopes), clamped(slope, 0.5))


# Whole steps


def scalar_on(target: Target) -> tuple[torch.dtype, torch.Size, str]:
    return torch.float32, torch.Size([]), target.device_type
