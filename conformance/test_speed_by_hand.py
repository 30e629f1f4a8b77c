"""Speed beside casts by hand: what a region adds to the time of the casts and operations that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conformance.harness.check import Case, contract, deep, timed
from conformance.harness.targets import Target, device_module
from conformance.judging import timing
from conformance.measure.clocks import Clock, Work, device_clock, repeated
from conformance.measure.comparison import PLANS, Comparison
from conformance.measure.intervals import Interval
from conformance.measure.threads import one_thread
from conformance.measure.waits import voluntary_waits

F = torch.nn.functional
# The least slow-down that the chapter sets out to find (docs/measuring.md); a processor's own time is counted coarser.
ALLOWED = {"accelerator": 1.10, "cpu": 1.25}
LONGEST = 1.0  # seconds of a comparison, which a machine in order mostly has done in a tenth
SHORTEST = 1e-3  # seconds of one timed run, in which what surrounds it is lost
RUNS = 8  # whose waits are counted
APART = 5  # pairs from which on arms without an overlap tell, where they are too few for an interval
# The first at which a run is as long as that. On a processor entering and leaving a region takes 3 to 60 µs, as the
# version of torch has it, which is no part of the claim; a device without fast units takes seconds for the largest.
SIZES = {"accelerator": (1024, 2048, 4096), "cpu": (96, 192, 384, 768)}

# Leaves, and what is computed of them.
Program = tuple[list[torch.Tensor], Callable[..., torch.Tensor]]


def _leaves(device: torch.device, rng: torch.Generator, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=rng).div(shape[-1] ** 0.5).to(device).requires_grad_() for shape in shapes]


def _linear(device: torch.device, size: int, rng: torch.Generator) -> Program:
    return _leaves(device, rng, (size, size), (size, size), (size,)), F.linear


def _matmul(device: torch.device, size: int, rng: torch.Generator) -> Program:
    return _leaves(device, rng, (size, size), (size, size)), torch.matmul


def _conv2d(device: torch.device, size: int, rng: torch.Generator) -> Program:
    channels, side = max(8, size // 32), max(16, size // 16)
    shapes = ((8, channels, side, side), (channels, channels, 3, 3))
    return _leaves(device, rng, *shapes), lambda x, weight: F.conv2d(x, weight, padding=1)


def _layers(device: torch.device, size: int, rng: torch.Generator) -> Program:
    """Three layers, the weight of one of which is used twice: its cast is cached."""

    def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(F.relu(F.linear(x, first)), second)), second)

    return _leaves(device, rng, (size, size), (size, size), (size, size)), forward


PROGRAMS: dict[str, Callable[[torch.device, int, torch.Generator], Program]] = {
    "linear": _linear,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "layers": _layers,
}


@contract("AMP-SPEED-050")
@timed
@pytest.mark.parametrize("program", ["linear", deep("standard", "matmul"), deep("standard", "conv2d"), "layers"])
def test_a_region_takes_the_time_of_its_casts(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, program: str
) -> None:
    kind = "cpu" if target.device_type == "cpu" else "accelerator"
    clock = device_clock(target.device_type, device_module(target.device_type))
    case.note("clock", clock.name)
    with one_thread():
        for size in SIZES[kind]:
            region, by_hand = _arms(target, amp_dtype, *PROGRAMS[program](target.device, size, rng))
            once = min(clock.seconds(by_hand) for _ in range(3))
            if once >= SHORTEST:
                break
        times = max(1, math.ceil(SHORTEST / once))
        seen, slowdown = _compare(case, target, clock, repeated(by_hand, times), repeated(region, times), ALLOWED[kind])
        waits = [voluntary_waits(region) for _ in range(RUNS)] if kind == "cpu" else [None]
    case.timings(
        [seconds / times for seconds in seen.candidate],
        {"program": program, "size": size, "times as long as by hand": slowdown.estimate},
    )
    if (told := [wait for wait in waits if wait is not None]) != []:
        # A wait for a page of memory may happen in any run, one that is in the region's path happens in each.
        case.at_most(f"runs of {RUNS} in which the region waits", sum(wait > 0 for wait in told), RUNS // 2)
    _judge(case, seen, slowdown, ALLOWED[kind])


def _arms(
    target: Target, dtype: torch.dtype, leaves: list[torch.Tensor], function: Callable[..., torch.Tensor]
) -> tuple[Work, Work]:
    """Forward and backward in a region, and the same with each leaf cast once by hand."""

    def backward(result: torch.Tensor) -> None:
        for leaf in leaves:
            leaf.grad = None
        result.backward(torch.ones_like(result))

    def region() -> None:
        with target.autocast(dtype):
            result = function(*leaves)
        backward(result)

    def by_hand() -> None:
        backward(function(*(leaf.to(dtype) for leaf in leaves)))

    return region, by_hand


def _compare(
    case: Case, target: Target, clock: Clock, by_hand: Work, region: Work, allowed: float
) -> tuple[Comparison, Interval]:
    """How many times as long the region takes, no finer than two equal arms differ."""
    # The interval, and the noise floor on either side, which is as wide at most, have to fit between 1 and the limit.
    plan = replace(PLANS["full"], width=(allowed - 1) / 2, budget=min(LONGEST, case.allowance / 2), warm_ups=5)
    name = "a region and its casts by hand"
    taken = timing.take(case, target, clock, (region, by_hand), plan, name=name)
    seen, slowdown = taken.comparison, taken.speedup
    case.note("noise floor: how far two equal arms differ", math.exp(taken.floor) - 1, "of their ratio")
    case.note("pairs", len(seen.candidate))
    case.note("times as long as by hand: low end, median, high end", [slowdown.low, slowdown.estimate, slowdown.high])
    if taken.spoiled is not None:
        case.inconclusive(taken.spoiled)
    return Comparison(seen.candidate, seen.baseline, seen.stopped), slowdown


def _judge(case: Case, seen: Comparison, slowdown: Interval, allowed: float) -> None:
    """By the interval; where it cannot tell, the fastest runs may, as what disturbs a run only adds to its time."""
    if slowdown.low > allowed:
        case.at_most("low end of the time in a region over that by hand", slowdown.low, allowed)
    if slowdown.high <= allowed:
        case.at_most("high end of the time in a region over that by hand", slowdown.high, allowed)
        return
    if len(seen.candidate) >= APART:
        # That all runs of one arm exceed all of the other by chance has a probability of 1 in (2 n choose n), 252 at 5.
        least = min(seen.candidate) / max(seen.baseline)
        if least > allowed:
            case.at_most("fastest run in a region over the slowest by hand", least, allowed)
    fastest = min(seen.candidate, default=math.inf) / min(seen.baseline, default=math.inf)
    if not fastest <= allowed:
        known = 0 < slowdown.low <= slowdown.high < math.inf
        case.inconclusive(
            f"the region takes {slowdown.estimate:.3g} times as long as its casts by hand, in "
            f"[{slowdown.low:.3g}, {slowdown.high:.3g}], and {allowed:g} is inside"
            if known
            else f"in the time that the case had there were {len(seen.candidate)} pairs and as many of equal arms, too "
            "few for an interval: the machine is busy, or the level too shallow for it"
        )
    case.at_most("fastest run in a region over the fastest by hand, where the interval cannot tell", fastest, allowed)
