"""Check optimizers inside autocast regions, with the smallest gradients, and duck-typed ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, gradients, snapshot
from ...workloads.gradients import NON_FINITE
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.third_party_optimizers import DuckTyped, Wrapped
from .float64_updates import UPDATES, steps
from .optimizer_configs import OptimizerConfig
from .support import ROUTES, U, build, clones, iterate, over_optimizers, twins, unmoved

# fp16's smallest number, 2**-24, divided by the initial loss scale, 65536.
SMALLEST = 2.0**-40


@contract("AMP-OPTIMIZER-094")
@pytest.mark.parametrize("maker", [DuckTyped, Wrapped], ids=["alone", "around-another"])
def test_what_acts_as_an_optimizer(
    case: Case, target: Target, rng: torch.Generator, maker: Callable[[Iterable[Any]], Any]
) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = maker(slopes.groups()), torch.amp.GradScaler(target.device_type)
        case.true("control: it is not a torch.optim.Optimizer", not isinstance(optimizer, torch.optim.Optimizer))
        start, slope = clones(slopes), slopes.draw(rng)
        for name, bad in NON_FINITE.items():
            iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", bad)), scaler, explicit=explicit)
            case.equal(f"parameters that {name} did not move", unmoved(slopes, start), list(range(len(start))))
        case.equal("result of a clean step()", iterate(optimizer, slopes.loss(slope), scaler), "stepped")
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number} after a clean step, against p - g", parameter, began - gradient)
        case.equal("scale", scaler.get_scale(), 2.0**16 / 2 ** len(NON_FINITE))


@contract("AMP-OPTIMIZER-095")
@over_optimizers(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense", variants=None)
def test_steps_inside_a_region(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for dtype, explicit in itertools.product(case.amp_dtypes, ROUTES):
        slopes, twin, optimizer, plain = twins(case, target, rng, kind)
        scaler, outer = (torch.amp.GradScaler(target.device_type, init_scale=1000.0) for _ in range(2))
        for bad in (False, True, False):
            slope = slopes.draw(rng)
            slope = with_nonfinite(slope, "last", math.inf) if bad else slope
            iterate(plain, twin.loss(slope), outer, explicit=explicit)
            optimizer.zero_grad()
            scaler.scale(slopes.loss(slope)).backward()
            with target.autocast(dtype):
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            what = f"{dtype}, unscale_ {'called' if explicit else 'not called'}"
            seen = {**snapshot(optimizer), **gradients(slopes.parameters)}
            expected = {**snapshot(plain), **gradients(twin.parameters)}
            case.equal(f"{what}: differences from the step outside the region", differences(seen, expected), [])
            case.equal(f"{what}: scale, against outside", scaler.get_scale(), outer.get_scale())


def tiny(slopes: LinearLoss, rng: torch.Generator) -> list[torch.Tensor]:
    """Return gradients that, times 65536, are fp16's smallest subnormal numbers."""
    return [
        torch.randint(1, 17, part.shape, generator=rng).to(part.device, torch.float32) * SMALLEST
        for part in slopes.draw(rng)
    ]


def from_zero(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> tuple[LinearLoss, torch.optim.Optimizer]:
    """Return parameters of zero, to which every step adds exactly, and an optimizer over them; see `bare`."""
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    with torch.no_grad():
        for parameter in slopes.parameters:
            parameter.zero_()
    return slopes, build(case, kind, slopes)


def bare(kind: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer with torch's default eps, without weight decay and initial accumulator."""
    hiding = ("eps", "weight_decay", "initial_accumulator_value")
    kept = {name: value for name, value in kind.arguments.items() if name not in hiding}
    return replace(kind, arguments=MappingProxyType(kept))


@contract("AMP-OPTIMIZER-096")
@over_optimizers(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense")
def test_smallest_gradients_take_the_written_step(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    """Bound the error as for AMP-OPTIMIZER-032: the bound is relative, and every term stays a normal fp32 number; the
    smallest is the square of the smallest gradient, 2**-80, times 1 - beta."""
    kind = bare(kind)
    slopes, optimizer = from_zero(case, target, rng, kind)
    scaler = torch.amp.GradScaler(target.device_type)
    gradients_by_step = [tiny(slopes, rng) for _ in range(3)]
    for slope in gradients_by_step:
        iterate(optimizer, slopes.loss(slope), scaler)
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.9, 0.999) if "Adam" in kind.optimizer else (0.0,))))
    worst = 0.0
    for number, parameter in enumerate(slopes.moving):
        histories = zip(*(slope[number].flatten().tolist() for slope in gradients_by_step), strict=True)
        for seen, history in zip(parameter.flatten().tolist(), histories, strict=True):
            path = [0.0, *steps(kind.optimizer, 0.0, history, kind.arguments)]
            travelled = sum(abs(b - a) for a, b in itertools.pairwise(path))
            bound = 3 * U * (4 * max(map(abs, path)) + 16 * amplified * travelled)
            worst = max(worst, abs(seen - path[-1]) / bound)
    case.at_most("largest error of a parameter after three steps", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-096")
@over_optimizers(
    lambda kind: kind.optimizer not in UPDATES and kind.gradients == "dense" and kind.listed, variants=None
)
def test_smallest_gradients_move_every_optimizer(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    slopes, optimizer = from_zero(case, target, rng, bare(kind))
    scaler = torch.amp.GradScaler(target.device_type)
    before = clones(slopes)
    for step in range(3):
        iterate(optimizer, slopes.loss(tiny(slopes, rng)), scaler)
        now = clones(slopes)
        still = sum(int((new >= old).sum()) for new, old in zip(now, before, strict=True))
        case.equal(f"elements that step {step} did not move against their gradient", still, 0)
        before = now
