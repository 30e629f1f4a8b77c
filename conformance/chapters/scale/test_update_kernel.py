"""Check the kernel of update() bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.storages import memory
from ...scaler import model as oracle
from .support import raises_error


def _exact(target: Target, factors: tuple[float, ...]) -> tuple[float, ...]:
    """Return the factors that the device can multiply by: they are doubles, of which one without float64 has some."""
    if target.computes_in(torch.float64):
        return factors
    return tuple(one for one in factors if oracle.rounded(one, oracle.FP32) == one)


@contract("AMP-SCALE-142")
@pytest.mark.parametrize(
    "scale", [65536.0, 3.0, 2.0**127, oracle.FP32.largest, oracle.FP32.smallest], ids="{:g}".format
)
def test_update_scale(case: Case, target: Target, scale: float) -> None:
    if 0 < scale < torch.finfo(torch.float32).tiny:
        case.require_subnormals(target)
    growths = _exact(target, (2.0, 1.5, 1.1, *(() if case.level == "quick" else (1 + 2**-30, 1e30))))
    backoffs = _exact(target, (0.5, 0.75, 0.9, 0.1))
    counts = ((0, 1), (0, 2), (1, 2), (1998, 2000), (1999, 2000))
    wrong = []
    arguments = list(itertools.product(growths, backoffs, counts, (0.0, 1.0, 2.0)))
    for growth, backoff, (count, interval), found in arguments:
        tensor = torch.tensor(scale, device=target.device)
        steps = torch.tensor(count, dtype=torch.int32, device=target.device)
        flag = torch.tensor(found, device=target.device)
        answer = torch._amp_update_scale_(tensor, steps, flag, growth, backoff, interval)
        seen = (tensor.item(), steps.item(), flag.item(), memory(answer) == memory(tensor))
        expected = (*oracle.update_scale(scale, count, found, growth, backoff, interval), found, True)
        if seen != expected:
            wrong.append(
                f"growth {growth}, backoff {backoff}, count {count} of {interval}, found {found}: "
                f"scale, tracker, flag, in place {seen}, expected {expected}"
            )
    case.note("updates compared", len(arguments))
    case.equal("updates that differ from the model", wrong, [])


def updated(
    target: Target, scale: float, count: int, found: float, growth: float, backoff: float, interval: int
) -> tuple[float, int]:
    """Return the scale and the tracker after one call of the kernel."""
    tensor = torch.tensor(scale, device=target.device)
    tracker = torch.tensor(count, dtype=torch.int32, device=target.device)
    torch._amp_update_scale_(tensor, tracker, torch.tensor(found, device=target.device), growth, backoff, interval)
    return tensor.item(), int(tracker.item())


def equal_states(seen: tuple[float, int], expected: tuple[float, int]) -> bool:
    """Return whether two states are equal, NaN scales included, and zeros of the same sign."""
    return repr(seen) == repr(expected)


def wrong_updates(target: Target, arguments: Iterable[tuple[Any, ...]]) -> list[str]:
    """Describe the mismatches with the model: (scale, tracker, found_inf, growth, backoff, interval)."""
    wrong = []
    for update in arguments:
        seen, expected = updated(target, *update), oracle.update_scale(*update)
        if not equal_states(seen, expected):
            wrong.append(f"scale, tracker, flag, growth, backoff, interval {update}: {seen}, expected {expected}")
    return wrong


INTERVALS = (1, 2, 3, 4, 1999, 2000, 2001, 2**31 - 1)


@contract("AMP-SCALE-148")
def test_interval_boundaries(case: Case, target: Target) -> None:
    counts = (0, 1, 2, 3, 1997, 1998, 1999, 2000, 2**31 - 3, 2**31 - 2)
    arguments = [
        (1024.0, count, found, 2.0, 0.5, interval)
        for count, interval, found in itertools.product(counts, INTERVALS, (0.0, 1.0))
        if count < interval  # AMP-SCALE-067 is about counts beyond a lowered interval
    ]
    case.note("updates compared", len(arguments))
    case.equal("updates that differ from the model", wrong_updates(target, arguments)[:3], [])


@contract("AMP-SCALE-148")
def test_intervals_beyond_32_bits(case: Case, target: Target) -> None:
    arguments = [
        (8.0, count, 0.0, 2.0, 0.5, interval) for count in (0, 1) for interval in (2**32 + 1, 2**32 + 2, 2**40)
    ]
    case.equal("updates that differ from the model", wrong_updates(target, arguments)[:3], [])


@contract("AMP-SCALE-148")
def test_any_factors(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    case.require_arithmetic(target, torch.float64)
    draw = random.Random(case.seed)
    special = (0.0, oracle.FP32.smallest, 2.0**-126, 1.0, 2.0**127, oracle.FP32.largest, math.inf)
    growths = (1 + 2**-52, 1 + 2**-24, 1.1, 2.0, 1e30, sys.float_info.max)
    backoffs = (0.0, sys.float_info.min, 1e-30, 0.1, 1 - 2**-25, 1 - 2**-53)
    arguments = [
        (scale, 0, found, growth, backoff, 1)
        for scale, growth, backoff, found in itertools.product(special, growths, backoffs, (0.0, 1.0))
    ]
    for _ in range(case.samples(quick=500, standard=4000, full=200_000)):
        scale = oracle.rounded(draw.uniform(1, 2) * 2.0 ** draw.randint(-149, 127), oracle.FP32)
        growth, backoff = 1 + draw.random() * 2.0 ** draw.randint(-52, 6), draw.random()
        arguments.append((scale, draw.randint(0, 3), draw.choice((0.0, 0.0, 1.0, 2.0)), growth, backoff, 3))
    case.note("updates compared", len(arguments))
    case.equal("updates that differ from the model", wrong_updates(target, arguments)[:3], [])


@contract("AMP-SCALE-148")
def test_any_flag_above_zero(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    # Two devices that both found an inf add up to 2; flush-to-zero would lose the smallest.
    arguments = [
        (1024.0, 5, found, 2.0, 0.5, 6) for found in (-0.0, oracle.FP32.smallest, 0.5, 1.0, 2.0, 8.0, math.inf)
    ]
    case.equal("flags that the kernel treats otherwise than the model", wrong_updates(target, arguments), [])


@contract("AMP-SCALE-148")
@pytest.mark.parametrize("pattern", ["!", ".", "..!", ".!", "......!"], ids=["inf", "clean", "d2", "d1", "d6"])
def test_chains(case: Case, target: Target, pattern: str) -> None:
    case.require_subnormals(target)
    wrong, chains = [], [(2.0, 0.5, 1), (2.0, 0.5, 3), (1.7, 0.3, 2), (1 + 2**-20, 0.999, 1), (1.5, 0.75, 2)]
    chains = [one for one in chains if len(_exact(target, one[:2])) == 2]
    for start, (growth, backoff, interval) in itertools.product((65536.0, 2.0**-140, 2.0**126, 3.0), chains):
        tensor = torch.tensor(start, device=target.device)
        tracker = torch.zeros((), dtype=torch.int32, device=target.device)
        flags = {letter: torch.tensor(float(letter == "!"), device=target.device) for letter in ".!"}
        expected = (start, 0)
        for number in range(case.samples(quick=60, standard=400, full=4000)):
            letter = pattern[number % len(pattern)]
            torch._amp_update_scale_(tensor, tracker, flags[letter], growth, backoff, interval)
            expected = oracle.update_scale(*expected, float(letter == "!"), growth, backoff, interval)
            if not equal_states((tensor.item(), int(tracker.item())), expected):
                wrong.append(f"{start}, {growth}, {backoff}, {interval}: {tensor}, {tracker} in place of {expected}")
                break
    case.equal("sequences of updates that differ from the model", wrong[:3], [])


@contract("AMP-SCALE-149")
def test_refused_updates(case: Case, target: Target) -> None:
    device = target.device
    scale, flag = torch.tensor(8.0, device=device), torch.zeros((), device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    two = torch.ones(2, device=device)
    narrow = next(dtype for dtype in (torch.bfloat16, torch.float16) if target.computes_in(dtype))
    arguments = {
        "int64 tracker": (scale, tracker.long(), flag),
        "fp32 tracker": (scale, tracker.float(), flag),
        "16-bit scale": (scale.to(narrow), tracker, flag),
        "int32 flag": (scale, tracker, flag.int()),
        "two scales": (two, tracker, flag),
        "two trackers": (scale, two.int(), flag),
        "two flags": (scale, tracker, two),
    }
    kernel = torch._amp_update_scale_
    taken = [name for name, each in arguments.items() if not raises_error(kernel, *each, 2.0, 0.5, 1)]
    case.equal("arguments that raise no error", taken, [])
    case.equal("scale and tracker after the errors", (scale.item(), tracker.item()), (8.0, 0))
    kernel(scale, tracker, flag, 2.0, 0.5, 1)
    case.equal("control: the right dtypes are accepted", (scale.item(), tracker.item()), (16.0, 0))


@contract("AMP-SCALE-142")
def test_functional_update(case: Case, target: Target) -> None:
    for found, expected in ((0.0, (1.5, 0)), (1.0, (0.75, 0))):
        scale, flag = torch.tensor(1.0, device=target.device), torch.tensor(found, device=target.device)
        tracker = torch.tensor(2, dtype=torch.int32, device=target.device)
        grown, counted = torch.ops.aten._amp_update_scale(scale, tracker, flag, 1.5, 0.75, 3)
        case.equal(f"scale and tracker returned for a flag of {found}", (grown.item(), counted.item()), expected)
        case.equal("scale and tracker given", (scale.item(), tracker.item()), (1.0, 2))
