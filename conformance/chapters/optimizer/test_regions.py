"""Optimizers at the edges: inside a region, at the smallest gradients, and where an object only acts as one."""

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
from ...oracles.optimizer_state import departures, gradients, snapshot
from ...workloads.linear_loss import Slopes, spoilt
from ...workloads.third_party_optimizers import ActsAsOne, Wrapped
from .float64_updates import UPDATES, steps
from .optimizer_configs import Kind
from .test_optimizer import NON_FINITE, ROUTES, U, build, clones, each, iterate, unmoved

# What fp16's smallest number, 2**-24, is after the first loss scale, 65536, is divided out.
SMALLEST = 2.0**-40


@contract("AMP-OPTIMIZER-094")
@pytest.mark.parametrize("maker", [ActsAsOne, Wrapped], ids=["alone", "around-another"])
def test_what_acts_as_an_optimizer(
    case: Case, target: Target, rng: torch.Generator, maker: Callable[[Iterable[Any]], Any]
) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make("dense", target.device, rng)
        optimizer, scaler = maker(slopes.groups()), torch.amp.GradScaler(target.device_type)
        case.true("control: it is no torch.optim.Optimizer", not isinstance(optimizer, torch.optim.Optimizer))
        start, slope = clones(slopes), slopes.draw(rng)
        for name, bad in NON_FINITE.items():
            iterate(optimizer, slopes.loss(spoilt(slope, "last", bad)), scaler, explicit=explicit)
            case.equal(f"parameters that {name} did not move", unmoved(slopes, start), list(range(len(start))))
        case.equal("what a clean step() returns", iterate(optimizer, slopes.loss(slope), scaler), "stepped")
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number} after a clean step, against p - g", parameter, began - gradient)
        case.equal("scale", scaler.get_scale(), 2.0**16 / 2 ** len(NON_FINITE))


@contract("AMP-OPTIMIZER-095")
@each(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense", variants=None)
def test_steps_inside_a_region(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    for dtype, explicit in itertools.product(case.amp_dtypes, ROUTES):
        slopes = Slopes.make(kind.gradients, target.device, rng)
        twin = slopes.copy()
        optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
        scaler, outer = (torch.amp.GradScaler(target.device_type, init_scale=1000.0) for _ in range(2))
        for bad in (False, True, False):
            slope = slopes.draw(rng)
            slope = spoilt(slope, "last", math.inf) if bad else slope
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
            case.equal(f"{what}: what differs from the step outside the region", departures(seen, expected), [])
            case.equal(f"{what}: scale, against outside", scaler.get_scale(), outer.get_scale())


def tiny(slopes: Slopes, rng: torch.Generator) -> list[torch.Tensor]:
    """Slopes that fp16 holds, times 65536, as the last of its subnormal numbers."""
    return [
        torch.randint(1, 17, part.shape, generator=rng).to(part.device, torch.float32) * SMALLEST
        for part in slopes.draw(rng)
    ]


def from_zero(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> tuple[Slopes, torch.optim.Optimizer]:
    """Parameters of zero, beside which no step is lost, and the optimizer without what would hide a small gradient."""
    slopes = Slopes.make(kind.gradients, target.device, rng)
    with torch.no_grad():
        for parameter in slopes.parameters:
            parameter.zero_()
    return slopes, build(case, kind, slopes)


def bare(kind: Kind) -> Kind:
    """The optimizer with the eps that torch gives it, without decay and without a history to begin with."""
    hiding = ("eps", "weight_decay", "initial_accumulator_value")
    kept = {name: value for name, value in kind.arguments.items() if name not in hiding}
    return replace(kind, arguments=MappingProxyType(kept))


@contract("AMP-OPTIMIZER-096")
@each(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense")
def test_smallest_gradients_take_the_written_step(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    """The bound is that of AMP-OPTIMIZER-032: it is relative, and no term of these steps leaves fp32's normal numbers:
    the smallest is the square of the smallest gradient, 2**-80, times 1 - beta."""
    kind = bare(kind)
    slopes, optimizer = from_zero(case, target, rng, kind)
    scaler = torch.amp.GradScaler(target.device_type)
    drawn = [tiny(slopes, rng) for _ in range(3)]
    for slope in drawn:
        iterate(optimizer, slopes.loss(slope), scaler)
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.9, 0.999) if "Adam" in kind.optimizer else (0.0,))))
    worst = 0.0
    for number, parameter in enumerate(slopes.moving):
        histories = zip(*(slope[number].flatten().tolist() for slope in drawn), strict=True)
        for seen, history in zip(parameter.flatten().tolist(), histories, strict=True):
            path = [0.0, *steps(kind.optimizer, 0.0, history, kind.arguments)]
            travelled = sum(abs(b - a) for a, b in itertools.pairwise(path))
            bound = 3 * U * (4 * max(map(abs, path)) + 16 * amplified * travelled)
            worst = max(worst, abs(seen - path[-1]) / bound)
    case.at_most("largest error of a parameter after three steps", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-096")
@each(lambda kind: kind.optimizer not in UPDATES and kind.gradients == "dense" and kind.listed, variants=None)
def test_smallest_gradients_move_every_optimizer(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes, optimizer = from_zero(case, target, rng, bare(kind))
    scaler = torch.amp.GradScaler(target.device_type)
    before = clones(slopes)
    for step in range(3):
        iterate(optimizer, slopes.loss(tiny(slopes, rng)), scaler)
        now = clones(slopes)
        still = sum(int((new >= old).sum()) for new, old in zip(now, before, strict=True))
        case.equal(f"elements that step {step} did not move against their gradient", still, 0)
        before = now
