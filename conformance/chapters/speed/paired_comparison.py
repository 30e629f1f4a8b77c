"""Time two arms in pairs of random order until their ratio is precise enough or the time is used."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...measure.garbage import uncollected
from .clocks import BrokenTiming, Clock, Work, repeated
from .intervals import CONFIDENCE, Interval, median_ratio, order_statistic

REPORT_EVERY = 10  # pairs between two words of progress, which cost as much as some short runs
FEWEST_PAIRS = 8  # with which the extremes cover a median with 99 %: 1 - 2 / 2^8


@dataclass(frozen=True)
class Plan:
    """How long to measure: pairs of the pilot and at most, the wanted width of the interval, seconds, warm-up runs.

    `width` is high end over low end, less 1. `warm_ups` bounds the runs of each arm that precede the pilot, and
    `budget` the seconds of everything. Raises ValueError where `most` pairs are too few for an interval.
    """

    pilot: int
    most: int
    width: float
    budget: float = math.inf
    warm_ups: int = 20

    def __post_init__(self) -> None:
        order_statistic(self.most, self.confidence)

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of pairs after which the interval is looked at: the pilot's, twice that and so on, and the most."""
        doubled = [self.pilot * 2**i for i in range(self.most.bit_length()) if self.pilot * 2**i < self.most]
        return (*doubled, self.most)

    @property
    def confidence(self) -> float:
        """The confidence of the interval at each look, so that all of them together err no more often than allowed.

        A stop that depends on what was seen picks among the looks; that none of them errs has at least the probability
        of 1 less the sum of their errors (Bonferroni's inequality), so that the coverage holds for any stopping rule.
        """
        return 1 - (1 - CONFIDENCE) / len(self.looks)

    def within(self, pairs: float) -> Plan:
        """The plan for a budget that affords that many pairs: with fewer looks, between which less is to be divided."""
        if pairs >= self.most or pairs < FEWEST_PAIRS:
            return self
        # A second look pays only where it sees twice as much.
        pilot = self.pilot if 2 * self.pilot <= pairs else int(pairs)
        return replace(self, pilot=pilot, most=int(pairs))


_STEPS = 100  # of the clock's resolution that a run has to last, so that its reading is off by 1 % at most

# Two equal arms of width w have a floor of w at most where their interval covers 1, so that a difference of 2 w is
# found: one of 10 % at standard (2 log 1.04 < log 1.1), one of 20 % at quick, one of 5 % at full.
PLANS = {
    "quick": Plan(pilot=9, most=18, width=0.09, budget=2.0, warm_ups=5),
    "standard": Plan(pilot=10, most=160, width=0.04, budget=6.0, warm_ups=20),
    "full": Plan(pilot=12, most=768, width=0.02, budget=60.0, warm_ups=50),
}


@dataclass(frozen=True)
class Progress:
    """How far a comparison has come; `interval` is None until there are enough pairs for one."""

    done: int
    planned: int
    interval: Interval | None
    seconds_left: float


@dataclass(frozen=True)
class Comparison:
    """Seconds of both arms, pair by pair, and why no more were taken: the "width" is reached, "most", or the "budget".

    `confidence` is that of the interval at the look at which it stopped; above CONFIDENCE it is one of several looks.
    A run was `calls` calls of the work, by which its seconds are divided, as is `resolution`, the finest difference
    that the clock tells.
    """

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    stopped: str = "most"
    confidence: float = CONFIDENCE
    resolution: float = 0.0
    calls: int = 1

    @property
    def speedup(self) -> Interval:
        """How many times faster the candidate is, widened by what the clock cannot resolve."""
        seen = median_ratio(self.baseline, self.candidate, self.confidence)
        if self.confidence > CONFIDENCE:
            seen = replace(seen, coverage=CONFIDENCE)
        if not self.resolution or not self.baseline:
            return seen
        # Each time may be off by one step of the clock, in the worst case both in opposite directions.
        return seen.widened(sum(math.log1p(self.resolution / min(arm)) for arm in (self.baseline, self.candidate)))


# Of a rank sum, in standard deviations: equal halves are as far apart in one measurement of a thousand.
_APART = 3.3


def drifted(seen: Comparison, judged: Interval | None = None) -> str | None:
    """In words that the ratio was another in the second half of the pairs than in the first; None where it was not.

    One arm that warms up or slows down meanwhile makes the ratio of neither half that of the other, and an interval of
    all pairs one of neither. Wilcoxon's rank sum of the halves' ratios; fewer than 20 pairs decide nothing. If
    `judged`, the interval of the verdict, contains the ratio of either half, the change does not matter.
    """
    logs = [math.log(a / b) for a, b in zip(seen.baseline, seen.candidate, strict=True)]
    half = len(logs) // 2
    if half < 10:
        return None
    first, last = logs[:half], logs[-half:]
    above = sum((a > b) + (a == b) / 2 for a in first for b in last)
    spread = math.sqrt(half * half * (2 * half + 1) / 12)
    if abs(above - half * half / 2) <= _APART * spread:
        return None
    before, after = (math.exp(statistics.median(part)) for part in (first, last))
    if judged is not None and judged.low <= min(before, after) <= max(before, after) <= judged.high:
        return None
    return f"the ratio went from {before:.3g} in the first half of the pairs to {after:.3g} in the second"


def resolution(clock: Clock) -> float:
    """Return the finest difference in seconds that a clock tells; 0 where it is too fine to matter."""
    return float(getattr(clock, "resolution", 0.0))


def seconds(clock: Clock, work: Work, least: float = 0.0) -> float:
    """The seconds of one run, `least` where the clock tells less; raises BrokenTiming where that is none, or fewer."""
    taken = max(clock.seconds(work), least)
    if not 0 < taken < math.inf:
        raise BrokenTiming(f"{clock.name} tells {taken} s for a run")
    return taken


def warm_up(
    clock: Clock,
    work: Work,
    *,
    most: int,
    steady: float = 0.05,
    late: Callable[[], bool] = lambda: False,
) -> float:
    """Run `work` until two runs in a row are not faster than all before them by `steady`; return the fastest's seconds.

    Warming up makes runs faster: libraries load, kernels are chosen and compiled, clocks rise. What makes them slower
    later, heat, meets both arms of a pair alike. It ends after `most` runs, or where it is `late`, but not before the
    first; one too short for the clock's resolution counts as long as that.
    """
    least = resolution(clock)
    fastest, idle = seconds(clock, work, least), 0
    for _ in range(most - 1):
        if late() or idle == 2:
            break
        taken = seconds(clock, work, least)
        idle = 0 if taken < fastest * (1 - steady) else idle + 1
        fastest = min(fastest, taken)
    return fastest


@dataclass
class _Pairs:
    """Takes pairs: both arms once, in an order that a fair coin says."""

    clock: Clock
    arms: tuple[Work, Work]
    before: Callable[[], object]
    coin: random.Random
    calls: int = 1
    taken: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def warm_up(self, most: int, late: Callable[[], bool]) -> float:
        """Warm both arms up, and lengthen runs that the clock hardly tells; return the seconds of a pair."""
        fastest = [warm_up(self.clock, arm, most=most, late=late) for arm in self.arms]
        self.calls = max(1, math.ceil(_STEPS * resolution(self.clock) / min(fastest)))
        if self.calls > 1:
            self.arms = repeated(self.arms[0], self.calls), repeated(self.arms[1], self.calls)
        return sum(fastest) * self.calls

    def take(self) -> None:
        for arm in (0, 1) if self.coin.random() < 0.5 else (1, 0):
            self.before()
            self.taken[arm].append(seconds(self.clock, self.arms[arm]) / self.calls)

    def comparison(self, stopped: str, confidence: float) -> Comparison:
        baseline, candidate = map(tuple, self.taken)
        return Comparison(baseline, candidate, stopped, confidence, resolution(self.clock) / self.calls, self.calls)


def compare(
    clock: Clock,
    baseline: Work,
    candidate: Work,
    plan: Plan,
    *,
    before: Callable[[], object] | None = None,
    progress: Callable[[Progress], object] | None = None,
    now: Callable[[], float] = time.monotonic,
    seed: int | str = 0,
) -> Comparison:
    """Time both arms in pairs, after warming both up, until the interval is as narrow as the plan wants.

    The order within each pair is drawn by a fair coin, from `seed`. Were it fixed, say ABBA, noise with a rhythm of its
    own could favour one arm throughout; so, whatever the noise, each ratio lies above the true one as often as below
    it, independently of all others, as long as the noise does not know which arm runs. That is all that an
    order-statistic interval needs to be exact. The interval is looked at after as many pairs as `plan.looks` says, as
    far as the seconds that are left afford them; those know nothing of the ratio either.

    `before` runs untimed before every timed run (a Flush); `progress` is told after each of the first ten pairs, after
    every tenth, and at each look. Raises BrokenTiming where the clock tells no time.
    """
    pairs = _Pairs(clock, (baseline, candidate), before or (lambda: None), random.Random(seed))
    start = now()
    with uncollected():
        pace = pairs.warm_up(plan.warm_ups, lambda: now() - start > plan.budget / 2)
        warm = now()
        affordable = plan.within((plan.budget - (warm - start)) / pace)
        looks = affordable.looks
        for done in range(affordable.most):
            if now() - start + pace > plan.budget:
                return pairs.comparison("budget", affordable.confidence)
            pairs.take()
            pace = (now() - warm) / (done + 1)
            look = done + 1 in looks
            if not look and (progress is None or (done >= REPORT_EVERY and (done + 1) % REPORT_EVERY)):
                continue
            seen = pairs.comparison("width", affordable.confidence)
            if progress is not None:
                progress(_progress(seen, affordable, now() - start, pace))
            if look and _narrow(seen, plan):
                return seen
    return pairs.comparison("most" if affordable.most == plan.most else "budget", affordable.confidence)


def _narrow(seen: Comparison, plan: Plan) -> bool:
    # Without what the clock cannot resolve, which more pairs do not change.
    return replace(seen, resolution=0.0).speedup.width <= math.log1p(plan.width)


def _progress(seen: Comparison, plan: Plan, elapsed: float, pace: float) -> Progress:
    """Return how far it is to the look at which, as it seems, the interval will be narrow enough."""
    done, interval, width = len(seen.baseline), seen.speedup, math.log1p(plan.width)
    planned = plan.looks[0] if done <= plan.looks[0] else plan.most
    if interval.low > 0 and width > 0:
        # An interval of a median narrows with the root of the number of pairs.
        wanted = max(done, done * (interval.width / width) ** 2)
        planned = next((look for look in plan.looks if look >= wanted), plan.most)
    left = min(pace * (planned - done), max(0.0, plan.budget - elapsed))
    return Progress(done, planned, interval if interval.low > 0 else None, left)
