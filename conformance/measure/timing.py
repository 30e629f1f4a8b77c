"""How time is taken: a clock for each device, arms in turn, and a ratio with an exact interval."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

Work = Callable[[], object]

CONFIDENCE = 0.95
FEWEST_PAIRS = 6  # the least for which [smallest, largest] covers a median with 95 %


class BrokenTiming(RuntimeError):
    """A clock showed what cannot be: it does not wait for the work, or the work outran the hardware."""


class Clock(Protocol):
    """Times one piece of work on one device."""

    name: str

    def seconds(self, work: Work) -> float:
        """Do `work` once; the seconds it took, its work on the device included."""


class HostClock:
    """Wall time from an idle device to an idle device: what a user waits for."""

    name = "host clock, synchronised"

    def __init__(self, synchronize: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._now = now

    def seconds(self, work: Work) -> float:
        self._synchronize()
        start = self._now()
        work()
        self._synchronize()
        return self._now() - start


class EventClock:
    """Time between two events on the device's stream (CUDA, ROCm, XPU): what the device worked."""

    name = "device events"

    def __init__(self, module: Any) -> None:
        self._module = module

    def seconds(self, work: Work) -> float:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        self._module.synchronize()
        start.record()
        work()
        end.record()
        self._module.synchronize()
        return float(start.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds


def device_clock(device_type: str, module: ModuleType | None) -> Clock:
    """The finest clock of a device: events where its module has them, else the host's."""
    if device_type in ("cuda", "xpu"):
        return EventClock(module)
    return step_clock(device_type, module)


def step_clock(device_type: str, module: ModuleType | None) -> Clock:
    """The clock of a whole step as the host sees it."""
    synchronize = getattr(module, "synchronize", None) if device_type != "cpu" else None
    return HostClock(synchronize or (lambda: None))


@dataclass(frozen=True)
class Interval:
    """A median ratio with a confidence interval; `coverage` is the interval's exact confidence."""

    estimate: float
    low: float
    high: float
    coverage: float

    def judge(self, threshold: float) -> bool | None:
        """Whether the ratio reaches `threshold`: True or False if the whole interval says so, else None."""
        if self.low >= threshold:
            return True
        return False if self.high < threshold else None


@dataclass(frozen=True)
class Comparison:
    """Seconds of both arms, pair by pair, in the order in which they were taken."""

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]

    @property
    def speedup(self) -> Interval:
        """How many times faster the candidate is."""
        return median_ratio(self.baseline, self.candidate)


def order_statistic(samples: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """The largest k for which [k-th smallest, k-th largest] of `samples` values covers their median, and its coverage.

    The coverage is exact for any continuous distribution: 1 - 2 P(B < k) for B binomial(samples, 1/2). Raises
    ValueError where even the extremes don't reach `confidence`.
    """
    best = None
    below = 0.0
    for k in range(1, samples // 2 + 1):
        below += math.comb(samples, k - 1) / 2**samples
        if 1 - 2 * below < confidence:
            break
        best = (k, 1 - 2 * below)
    if best is None:
        raise ValueError(f"{samples} samples are too few for an interval of {confidence:.0%}")
    return best


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Median of the ratios of pairs, through their logarithms, with its order-statistic interval."""
    logs = sorted(math.log(a / b) for a, b in zip(numerators, denominators, strict=True))
    k, coverage = order_statistic(len(logs))
    return Interval(math.exp(statistics.median(logs)), math.exp(logs[k - 1]), math.exp(logs[len(logs) - k]), coverage)


def warm_up(clock: Clock, work: Work, *, most: int, steady: float = 0.1) -> None:
    """Run `work` until two runs in a row differ by less than `steady`, relative; at most `most` runs."""
    before = clock.seconds(work)
    for _ in range(most):
        now = clock.seconds(work)
        if abs(now - before) <= steady * before:
            return
        before = now


def compare(
    clock: Clock,
    baseline: Work,
    candidate: Work,
    *,
    pairs: int,
    budget: float = math.inf,
    warm_ups: int = 20,
    now: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Time both arms in turn, ABBA, after warming both up; stops early when `budget` seconds are spent.

    The order turns from pair to pair, so that a drift of the device (heat, clocks) adds to both arms alike. At least
    six pairs are taken whatever they cost. `warm_ups` bounds the runs of each arm that precede.
    """
    warm_up(clock, baseline, most=warm_ups)
    warm_up(clock, candidate, most=warm_ups)
    start = now()
    first: list[float] = []
    second: list[float] = []
    for pair in range(pairs):
        if pair >= FEWEST_PAIRS and now() - start > budget:
            break
        for arm in ("AB", "BA")[pair % 2]:
            if arm == "A":
                first.append(clock.seconds(baseline))
            else:
                second.append(clock.seconds(candidate))
    return Comparison(tuple(first), tuple(second))


def repeated(work: Work, times: int) -> Work:
    """`work`, that many times in a row."""

    def run() -> None:
        for _ in range(times):
            work()

    return run


def check_clock(clock: Clock, work: Work, *, tries: int = 5) -> float:
    """How many times longer four times the work takes; raises BrokenTiming below 2: the clock does not wait.

    A clock that only sees the launch, or that stands still, shows no such growth. The least of several tries is taken
    for both, as disturbances only add time.
    """
    once = min(clock.seconds(work) for _ in range(tries))
    fourfold = min(clock.seconds(repeated(work, 4)) for _ in range(tries))
    growth = fourfold / once if once > 0 else 0.0
    if growth < 2:
        raise BrokenTiming(f"four times the work took {growth:.2f} times as long: {clock.name} does not wait for it")
    return growth


def rate(operations: float, seconds: float, ceiling: float | None) -> float:
    """Operations a second; raises BrokenTiming above `ceiling`, which no such device can reach."""
    if seconds <= 0:
        raise BrokenTiming("the work took no time")
    seen = operations / seconds
    if ceiling is not None and seen > ceiling:
        raise BrokenTiming(f"{seen / 1e12:.1f} TFLOP/s where the device can do {ceiling / 1e12:.1f} at most")
    return seen


def ceiling(capability: str | None, processors: int | None, hertz: float | None, table: dict[str, Any]) -> float | None:
    """Operations a second that a device cannot exceed: processors x clock x FLOP per clock and processor.

    `table` maps compute capabilities to FLOP per clock (fixtures/peaks.toml) and gives the clock to assume where the
    device tells none. None where too little is known for a bound.
    """
    per_clock = table["flop_per_clock"].get(capability)
    if per_clock is None or processors is None:
        return None
    return float(per_clock) * processors * (hertz or table["highest_clock_hz"]) * table["allowance"]
