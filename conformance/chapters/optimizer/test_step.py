"""Check that a clean step through the scaler equals the fp32 step, for every optimizer and implementation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import MappingProxyType
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, gradients, snapshot
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .float64_updates import UPDATES, steps
from .optimizer_configs import OptimizerConfig
from .support import ALL, BOTH, ROUTES, U, build, clones, demand, iterate, kind_of, over_optimizers, twins, unmoved


@contract("AMP-OPTIMIZER-030")
@over_optimizers(quick=())
@pytest.mark.parametrize("exponent", [16, *(deep("full", k) for k in (0, -8, 60))])
def test_scaled_step_equals_unscaled(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, exponent: int
) -> None:
    for explicit in ROUTES:
        first = LinearLoss.make(kind.gradients, target.device, rng)
        second = first.copy()
        scaled, plain = build(case, kind, first), build(case, kind, second)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
        start = clones(first)
        for number in range(3):
            slope = first.draw(rng)
            iterate(scaled, first.loss(slope), scaler, explicit=explicit)
            iterate(plain, second.loss(slope))
            seen = {**snapshot(scaled), **gradients(first.parameters)}
            expected = {**snapshot(plain), **gradients(second.parameters)}
            what = f"differences from fp32 after step {number + 1}"
            case.equal(f"{what} ({'unscale_ first' if explicit else 'step alone'})", differences(seen, expected), [])
    case.equal("control: parameters that did not move", unmoved(first, start), [])


@contract("AMP-OPTIMIZER-031")
@over_optimizers(variants=None)
def test_gradients_end_unscaled(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make(kind.gradients, target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        slope = slopes.draw(rng)
        expected = torch.autograd.grad(slopes.loss(slope), slopes.moving)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        for number, (parameter, gradient) in enumerate(zip(slopes.moving, expected, strict=True)):
            case.identical(
                f"gradient {number} after step(), against the gradient of the unscaled loss", parameter.grad, gradient
            )


@contract("AMP-OPTIMIZER-032")
@over_optimizers(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense")
def test_step_equals_written_algorithm(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Bound the error: each of three steps rounds the parameter at most four times, relative to its own size, and its
    change in at most 16 operations; 1 - beta^t, in fp32 in some kernels, multiplies their rounding by 1 / (1 - beta).
    """
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    start = [parameter.flatten().tolist() for parameter in clones(slopes)]
    gradients_by_step = [slopes.draw(rng, positive=True) for _ in range(3)]
    skipped = with_nonfinite(gradients_by_step[0], "last", math.inf)
    for slope in (gradients_by_step[0], skipped, *gradients_by_step[1:]):
        iterate(optimizer, slopes.loss(slope), scaler)
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.9, 0.999) if "Adam" in kind.optimizer else (0.0,))))
    worst = 0.0
    for number, parameter in enumerate(slopes.moving):
        histories = zip(*(slope[number].flatten().tolist() for slope in gradients_by_step), strict=True)
        for seen, began, history in zip(parameter.flatten().tolist(), start[number], histories, strict=True):
            path = [began, *steps(kind.optimizer, began, history, kind.arguments)]
            travelled = sum(abs(b - a) for a, b in itertools.pairwise(path))
            bound = 3 * U * (4 * max(map(abs, path)) + 16 * amplified * travelled)
            worst = max(worst, abs(seen - path[-1]) / bound)
    case.at_most("largest error of a parameter after three steps", worst, 1.0, "of its bound")


# Usual settings, none of them a number of 16 bits, so that one that is rounded shows. A decay that is added to the
# gradient would hide eps.
USUAL: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 0.01, "lr_decay": 1e-4, "eps": 1e-10},
}
# (number of the step, elements, size of the gradients and moments); eps is of the size of the smallest.
LATE = ((2, 13, 1.0), (60, 4099, 1.0), (60, 13, 1e-8), (257, 13, 1.0), (2049, 1, 1.0), (70_000, 13, 1.0))
MOMENTS = {
    "momentum_buffer": ("buffer", 1),
    "exp_avg": ("mean", 1),
    "exp_avg_sq": ("square", 2),
    "max_exp_avg_sq": ("largest", 2),
    "sum": ("sum", 2),
}


@contract("AMP-OPTIMIZER-032")
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.optimizer in UPDATES and kind.first], ids=lambda k: k.id)
def test_late_step_of_usual_settings(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Bound the errors as above, for one step. Every number is positive, so that no sum cancels."""
    demand(case, kind, target.device)
    options = USUAL[kind.optimizer]

    def draw(elements: int, size: float) -> torch.Tensor:
        return ((torch.rand(elements, generator=rng) + 0.25) * size).to(target.device)

    parameters = [torch.nn.Parameter(draw(elements, 1.0)) for _, elements, _ in LATE]
    optimizer = dataclasses.replace(kind, arguments=MappingProxyType(options)).make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, (count, elements, size) in zip(parameters, LATE, strict=True):
        held = optimizer.state[parameter]
        for name in MOMENTS.keys() & held:
            held[name].copy_(draw(elements, size) ** MOMENTS[name][1])
        if "step" in held:
            held["step"] += count - 2
        parameter.grad = draw(elements, size) * 2.0**16
    before = [taken(optimizer, parameter) for parameter in parameters]
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**16)
    scaler.scale(torch.ones((), device=target.device))
    scaler.step(optimizer)
    amplified = 1 / (1 - max(options.get("betas", (0.0,))))
    worst: dict[str, float] = {}
    for parameter, (count, elements, size), old in zip(parameters, LATE, before, strict=True):
        new = taken(optimizer, parameter)
        for place in {*range(0, elements, 31), elements - 1}:
            state = {name: values[place] for name, values in old.items() if name not in ("parameter", "gradient")}
            start, gradient = old["parameter"][place], old["gradient"][place] / 2.0**16
            exact = UPDATES[kind.optimizer](start, gradient, count, state, options)
            bounds = {name: 16 * U * max(state[name], old[name][place]) for name in state}
            bounds["parameter"] = U * (4 * max(start, exact) + 16 * amplified * abs(exact - start))
            for name, value in {**state, "parameter": exact}.items():
                what = f"{name} of {elements} elements of size {size:g} in step {count}"
                share = abs(new[name][place] - value) / (bounds[name] + 2.0**-149)
                worst[what] = max(worst.get(what, 0.0), share)
    beyond = {what: share for what, share in worst.items() if not share <= 1}
    case.note("largest error of a parameter or its state", max(worst.values()), "of its bound")
    case.equal("errors beyond their bounds", beyond, {})


def taken(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, list[float]]:
    """Return the elements of a parameter, its gradient and the moments that the optimizer keeps of it."""
    held = {"parameter": parameter.detach(), "gradient": parameter.grad}
    held |= {MOMENTS[name][0]: value for name, value in optimizer.state[parameter].items() if name in MOMENTS}
    return {name: value.tolist() for name, value in held.items() if isinstance(value, torch.Tensor)}


@contract("AMP-OPTIMIZER-033")
@over_optimizers(lambda kind: kind.accepts("foreach") and kind.first)
def test_implementations_agree(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Bound the error as for the documented algorithm, with up to 32 operations and sums of up to 13 elements."""
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    reference = LinearLoss(tuple(torch.nn.Parameter(p.detach().cpu().double()) for p in slopes.parameters), "dense")
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    twin = next(one for one in ALL if (one.optimizer, one.implementation) == (kind.optimizer, "for-loop"))
    exact = twin.make(reference.groups())
    start = clones(reference)
    travelled = [torch.zeros_like(parameter) for parameter in start]
    for _ in range(3):
        slope = slopes.draw(rng, positive=True)
        iterate(optimizer, slopes.loss(slope), scaler)
        before = clones(reference)
        iterate(exact, reference.loss([part.cpu().double() for part in slope]))
        for way, now, then in zip(travelled, reference.moving, before, strict=True):
            way += (now.detach() - then).abs()
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.0,))))
    worst = 0.0
    for seen, right, began, way in zip(slopes.moving, reference.moving, start, travelled, strict=True):
        bound = 3 * U * (4 * (began.abs() + way) + (32 + 13) * amplified * way)
        worst = max(worst, float(((seen.detach().cpu().double() - right.detach()).abs() / bound).max()))
    case.at_most("largest distance of a parameter from a float64 run of the for-loop", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-035")
@over_optimizers(variants=None)
def test_parameter_groups_and_missing_gradients(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    alone = slopes.copy()
    build(case, kind, slopes.copy())
    settings: tuple[dict[str, Any], ...] = ({"lr": 0.25}, {**kind.other_settings(), "lr": 0.0625})
    groups = [{**group, **own} for group, own in zip(slopes.groups(), settings, strict=True)]
    parts = [
        kind.make(group["params"], **own)  # type: ignore[arg-type]
        for group, own in zip(alone.groups(), settings, strict=True)
    ]
    case.note("settings in which the second group differs", sorted(settings[1]))
    optimizer, scaler = kind.make(groups), torch.amp.GradScaler(target.device_type)
    for number in range(3):
        if number == 2:  # a saved state brings the settings of each group
            saved, optimizer = optimizer.state_dict(), kind.make(slopes.groups())
            optimizer.load_state_dict(saved)
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(slope), scaler)
        alone.loss(slope).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    for number, (seen, expected) in enumerate(zip(slopes.parameters, alone.parameters, strict=True)):
        case.identical(f"parameter {number}, against its group's own fp32 optimizer", seen, expected)
    still = slopes.parameters[-1]
    case.equal("gradient of the parameter that the loss does not use", still.grad, None)
    made = {} if still not in optimizer.state else dict(optimizer.state[still])
    moved = {} if alone.parameters[-1] not in parts[1].state else dict(parts[1].state[alone.parameters[-1]])
    case.equal("state entries for it, against fp32", sorted(made), sorted(moved))


@contract("AMP-OPTIMIZER-036")
@BOTH
def test_added_parameter_group(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make("dense", target.device, rng)
    build(case, kind, slopes.copy())
    twin = slopes.copy()
    optimizer, plain = (kind.make(list(workload.parameters[:2])) for workload in (slopes, twin))
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    for number in range(2):
        iterate(optimizer, slopes.loss(slope), scaler)
        iterate(plain, twin.loss(slope))
        if number == 0:
            optimizer.add_param_group({"params": list(slopes.parameters[2:])})
            plain.add_param_group({"params": list(twin.parameters[2:])})
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(plain)), [])
    before = snapshot(optimizer)
    iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", math.nan)), scaler)
    case.equal("differences after NaN in the added group", differences(snapshot(optimizer), before), [])


def _changed(value: Any) -> Any:
    """Return a number, or each of a tuple, other than it is."""
    if isinstance(value, tuple):
        return tuple(_changed(one) for one in value)
    return value / 2 if isinstance(value, float) else value


@contract("AMP-OPTIMIZER-036")
@over_optimizers(variants=None)
def test_options_of_an_added_group(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Add a group after the options of the others have changed, as by a schedule."""
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer = build(case, kind, slopes)
    promised = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    iterate(optimizer, slopes.loss(slopes.draw(rng)), torch.amp.GradScaler(target.device_type))
    for key in promised:
        optimizer.param_groups[0][key] = _changed(promised[key])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=target.device))]})
    first, added = optimizer.param_groups[0], optimizer.param_groups[-1]
    case.true("control: the learning rate has changed", first["lr"] != promised["lr"], first["lr"])
    unlike = {key: added.get(key) for key, value in promised.items() if added.get(key) != value}
    case.equal("options of the added group that are not the optimizer's own", unlike, {})


@contract("AMP-OPTIMIZER-037")
@over_optimizers(variants=None)
def test_disabled_scaler(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    first = LinearLoss.make(kind.gradients, target.device, rng)
    second = first.copy()
    disabled, plain = build(case, kind, first), build(case, kind, second)
    scaler = torch.amp.GradScaler(target.device_type, enabled=False)
    for _ in range(2):
        slope = first.draw(rng)
        iterate(disabled, first.loss(slope), scaler, explicit=True)
        iterate(plain, second.loss(slope))
    case.equal("differences from fp32", differences(snapshot(disabled), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-080")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@over_optimizers(lambda kind: kind.gradients != "sparse", variants=None)
def test_zero_grad(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, set_to_none: bool) -> None:
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    scaler = torch.amp.GradScaler(target.device_type)
    for bad in (None, math.inf, None, math.nan, None):
        slope = slopes.draw(rng)
        scaler.scale(slopes.loss(slope if bad is None else with_nonfinite(slope, "first", bad))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
        if bad is None:
            twin.loss(slope).backward()
            plain.step()
            plain.zero_grad(set_to_none=set_to_none)
        left = [None if p.grad is None else int(p.grad.count_nonzero()) for p in slopes.moving]
        expected = [None if set_to_none else 0] * len(left)
        case.equal("nonzero elements of the gradients after zero_grad()", left, expected)
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-080")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@over_optimizers(lambda kind: kind.gradients != "sparse", variants=None)
def test_zero_grad_of_every_type(case: Case, target: Target, kind: OptimizerConfig, set_to_none: bool) -> None:
    """Gradients of each type and of two layouts, in two groups; the last parameter is frozen."""
    kinds = [(torch.float32, False), *((dtype, False) for dtype in case.supported(target)), (torch.float32, True)]
    kinds += [(torch.float64, False), (torch.complex64, False), (torch.float32, False)]
    parameters = []
    for dtype, strided in kinds:
        if not target.computes_in(dtype):
            continue
        made = torch.ones(4, 6, dtype=dtype, device=target.device)
        parameters.append(torch.nn.Parameter(made))
        parameters[-1].grad = torch.full_like(made, math.inf)
        if strided:
            parameters[-1].grad = torch.full((6, 4), math.nan, dtype=dtype, device=target.device).t()
    parameters[-1].requires_grad_(False)  # frozen since its backward
    try:
        optimizer = kind.make([{"params": parameters[:2]}, {"params": parameters[2:]}])
    except (TypeError, ValueError, RuntimeError) as error:
        case.note("refused by the constructor", repr(error)[:100])
        parameters = [parameter for parameter in parameters if parameter.dtype is torch.float32]
        optimizer = kind.make([{"params": parameters[:1]}, {"params": parameters[1:]}])
    optimizer.zero_grad(set_to_none=set_to_none)
    left = [(str(p.dtype), None if p.grad is None else int(p.grad.count_nonzero())) for p in parameters]
    expected = [(str(p.dtype), None if set_to_none else 0) for p in parameters]
    case.equal("nonzero elements of the gradients of each type after zero_grad()", left, expected)
    module = torch.nn.ParameterList(parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.inf)
    module.zero_grad(set_to_none=set_to_none)
    left = [(str(p.dtype), None if p.grad is None else int(p.grad.count_nonzero())) for p in parameters]
    case.equal("nonzero elements of the gradients of each type after zero_grad() of a module", left, expected)


@contract("AMP-OPTIMIZER-081")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_step_without_the_scaler(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    kind = kind_of("SGD", implementation, "plain")
    slopes = LinearLoss.make("dense", target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
    start, slope = clones(slopes), slopes.draw(rng)
    scaler.scale(slopes.loss(slope)).backward()
    optimizer.step()
    for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
        wrong = began.cpu().double() - 0.25 * 1024 * gradient.cpu().double()
        error = float(((parameter.cpu().double() - wrong).abs() / (began.cpu().abs() + wrong.abs())).max())
        case.at_most(f"distance of parameter {number} from p - lr * scale * g", error, 2 * U, "relative")
    optimizer.zero_grad()
    scaler.scale(slopes.loss(with_nonfinite(slope, "last", math.inf))).backward()
    optimizer.step()
    case.equal("finite parameters after a direct step on inf", bool(slopes.moving[-1].isfinite().all()), False)
