"""Check that a region takes no longer than the same operations with manual casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from ...harness.check import Case, contract, deep, timed
from ...harness.targets import Target, device_module
from ...measure.threads import one_thread
from ...measure.waits import voluntary_waits
from ...oracles.trace import counts
from ...oracles.trace.ops import trace_of
from . import timing
from .clocks import Clock, Work, device_clock, repeated
from .intervals import Interval
from .paired_comparison import PLANS, Comparison
from .timing import ARITHMETIC

F = torch.nn.functional
# The smallest slow-down that the chapter must detect (docs/measuring.md); a processor's own time is counted coarser.
ALLOWED = {"accelerator": 1.10, "cpu": 1.25}
LONGEST = 1.0  # seconds of a comparison; an idle machine mostly needs a tenth
SHORTEST = 1e-3  # seconds of one timed run, so that its overhead is negligible
RUNS = 8  # runs whose blocking is counted
LARGEST_KEPT = 31 * 2**20  # bytes, with what glibc adds to it below its limit
AGAIN = 4.0  # seconds of further runs where a busy machine left the comparison undecided
# How often what is too slow or blocks is measured, each time on new tensors: a disturbance passes, and so does the way
# in which the heap happens to lie; what a region does is in each measurement.
MEASUREMENTS = 3
APART = 5  # pairs from which on disjoint arms decide, where there are too few for an interval
# Sizes, each with the seconds that make a run of it long enough; the first that is gets timed, otherwise the last. On a
# processor entering and leaving a region takes 3 to 60 µs, as the version of torch has it, which is no part of the
# claim. An accelerator's small operations tell its launches alone, unless it is so slow that they take far longer; a
# device in software takes half a minute for a size that fills a card.
SIZES = {
    "accelerator": (
        (64, ARITHMETIC),
        (96, ARITHMETIC),
        (128, ARITHMETIC),
        (256, ARITHMETIC),
        (512, ARITHMETIC),
        (1024, SHORTEST),
        (2048, SHORTEST),
        (4096, SHORTEST),
    ),
    "cpu": ((96, SHORTEST), (192, SHORTEST), (384, SHORTEST), (768, SHORTEST)),
}

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
    """Return three layers, the weight of one of which is used twice: its cast is cached."""

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
    _keep_pages()
    for _ in range(MEASUREMENTS):
        with one_thread():
            for size, enough in SIZES[kind]:
                region, manual = _arms(target, amp_dtype, *PROGRAMS[program](target.device, size, rng))
                once = min(clock.seconds(manual) for _ in range(3))
                if once >= enough:
                    break
            times = max(1, math.ceil(SHORTEST / once))
            taken = _compare(case, target, clock, repeated(manual, times), repeated(region, times), ALLOWED[kind])
            waits = _runs_that_wait(region, manual) if kind == "cpu" else None
        if not (_is_slow(taken, ALLOWED[kind]) or _blocks(waits)):
            break
    _judge_operations(case, region, manual)
    case.note("noise floor: how far two equal arms differ", math.exp(taken.floor) - 1, "of their ratio")
    case.note("pairs", len(taken.comparison.candidate))
    slowdown = taken.speedup
    case.note(
        "times as long as with manual casts: low end, median, high end",
        [slowdown.low, slowdown.estimate, slowdown.high],
    )
    if taken.invalid is not None:
        case.note("measurement invalid", taken.invalid)
    case.timings(
        [seconds / times for seconds in taken.comparison.baseline],
        {"program": program, "size": size, "times as long as with manual casts": slowdown.estimate},
    )
    _judge_waits(case, waits)
    every = taken.comparison
    if _is_undecided(taken, ALLOWED[kind]):
        every = _further_runs(case, clock, every, repeated(manual, times), repeated(region, times), ALLOWED[kind])
    _judge(case, taken, every, ALLOWED[kind])


def _keep_pages() -> None:
    """Have the C library keep what is freed, as it does in a program that has freed something large before.

    glibc gives the end of its heap back where more than a threshold is free there, and then each run fills its pages
    again, some hundred of them, more in one arm than in the other, as the heap happens to lie. Freeing a block that was
    mapped by itself raises the threshold to twice its size, up to DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB (malloc/malloc.c;
    mallopt(3), M_MMAP_THRESHOLD). Where other allocators are in place this does nothing.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def _arms(
    target: Target, dtype: torch.dtype, leaves: list[torch.Tensor], function: Callable[..., torch.Tensor]
) -> tuple[Work, Work]:
    """Return forward and backward in a region, and the same with each leaf manually cast once."""

    def backward(result: torch.Tensor) -> None:
        for leaf in leaves:
            leaf.grad = None
        result.backward(torch.ones_like(result))

    def region() -> None:
        with target.autocast(dtype):
            result = function(*leaves)
        backward(result)

    def manual() -> None:
        backward(function(*(leaf.to(dtype) for leaf in leaves)))

    return region, manual


def _compare(case: Case, target: Target, clock: Clock, manual: Work, region: Work, allowed: float) -> timing.Timing:
    """Time both arms (region, manual) and return the slow-down, no finer than two equal arms differ."""
    # The interval, and the noise floor on either side, which is as wide at most, have to fit between 1 and the limit.
    plan = replace(PLANS["full"], width=(allowed - 1) / 2, budget=min(LONGEST, case.allowance / 2), warm_ups=5)
    name = "a region and its manual casts"
    return timing.take(case, target, clock, (region, manual), plan, name=name)


def _is_slow(taken: timing.Timing, allowed: float) -> bool:
    """Return whether the whole interval of a valid measurement is beyond the limit, or each run of one arm is."""
    if taken.invalid is not None:
        return False
    region, manual = taken.comparison.baseline, taken.comparison.candidate
    return taken.speedup.low > allowed or _all_slower(region, manual, allowed)


def _all_slower(region: Sequence[float], manual: Sequence[float], allowed: float) -> bool:
    """Return whether the fastest run of many in a region is beyond the limit of the slowest with manual casts."""
    # That all runs of one arm exceed all of the other by chance has a probability of 1 in (2 n choose n), 252 at 5.
    return len(region) >= APART and min(region) > allowed * max(manual)


def _judge_operations(case: Case, region: Work, manual: Work) -> None:
    """Judge what is run in both arms by its count, which no load of the machine changes."""
    ours, theirs = (trace_of(work).ops for work in (region, manual))
    case.equal("operations in the region, casts apart", counts.work(ours), counts.work(theirs))
    case.at_most("casts in the region", counts.casts(ours), counts.casts(theirs))


def _is_undecided(taken: timing.Timing, allowed: float) -> bool:
    """Return whether neither the interval nor the fastest runs tell that the region is as fast as it must be."""
    seen = taken.comparison
    if taken.invalid is None and (taken.speedup.low > allowed or taken.speedup.high <= allowed):
        return False
    return not _as_fast(seen.baseline, seen.candidate, allowed)


def _as_fast(region: Sequence[float], manual: Sequence[float], allowed: float) -> bool:
    """Return whether the fastest runs tell that the region is as fast as it must be; no runs tell nothing."""
    return bool(region) and bool(manual) and min(region) <= allowed * min(manual)


def _further_runs(case: Case, clock: Clock, seen: Comparison, manual: Work, region: Work, allowed: float) -> Comparison:
    """Go on with both arms in turn until the fastest runs decide, or the time is over: load only adds to a run."""
    until = case.now() + min(AGAIN, case.allowance / 2)
    slow, fast = list(seen.baseline), list(seen.candidate)
    while not _as_fast(slow, fast, allowed) and case.now() < until:
        fast.append(clock.seconds(manual))
        slow.append(clock.seconds(region))
    case.note("further pairs", len(fast) - len(seen.candidate))
    return replace(seen, baseline=tuple(slow), candidate=tuple(fast))


def _runs_that_wait(region: Work, manual: Work) -> tuple[int, int] | None:
    """Return in how many of some runs of each, in turn, the thread blocks; None if the kernel does not count it."""
    waits = [(voluntary_waits(region), voluntary_waits(manual)) for _ in range(RUNS)]
    if any(None in pair for pair in waits):
        return None
    ours, theirs = zip(*waits, strict=True)
    return sum(map(bool, ours)), sum(map(bool, theirs))


def _blocks(waits: tuple[int, int] | None) -> bool:
    """Return whether the region blocks in most runs, and not the manual casts, as they do where another thread waits.

    A wait for a memory page may happen in any run, one in the region's path happens in each.
    """
    return waits is not None and waits[1] <= RUNS // 2 < waits[0]


def _judge_waits(case: Case, waits: tuple[int, int] | None) -> None:
    if waits is None:
        return
    region, manual = waits
    case.note(f"runs of {RUNS} with manual casts that block", manual)
    if manual <= RUNS // 2:
        case.at_most(f"runs of {RUNS} in which the region blocks", region, RUNS // 2)


def _judge(case: Case, taken: timing.Timing, every: Comparison, allowed: float) -> None:
    """Judge by the interval; if it is undecided, by the fastest of every run, as any disturbance only adds time.

    Runs that were added until the fastest decide are none for the interval, which they would bias.
    """
    region, manual, slowdown = every.baseline, every.candidate, taken.speedup
    if taken.invalid is None:
        if slowdown.low > allowed:
            case.at_most("low end of the time in a region over that with manual casts", slowdown.low, allowed)
        if slowdown.high <= allowed:
            case.at_most("high end of the time in a region over that with manual casts", slowdown.high, allowed)
            return
        if _all_slower(region, manual, allowed):
            least = min(region) / max(manual)
            case.at_most("fastest run in a region over the slowest with manual casts", least, allowed)
    fastest = min(region, default=math.inf) / min(manual, default=math.inf)
    if not fastest <= allowed:
        case.inconclusive(taken.invalid or _undecided(slowdown, len(region), allowed))
    case.at_most("fastest run in a region over the fastest with manual casts (undecided interval)", fastest, allowed)


def _undecided(slowdown: Interval, pairs: int, allowed: float) -> str:
    if 0 < slowdown.low <= slowdown.high < math.inf:
        return (
            f"the region takes {slowdown.estimate:.3g} times as long as its manual casts, in "
            f"[{slowdown.low:.3g}, {slowdown.high:.3g}], and {allowed:g} is inside"
        )
    return (
        f"in the time that the case had there were {pairs} pairs and as many of equal arms, too few for an interval: "
        "the machine is busy, or the level too shallow for it"
    )
