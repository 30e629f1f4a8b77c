"""Comparisons: two arms timed in turn until their ratio is known well enough, or time is up."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conformance.measure.clocks import Clock, Work
from conformance.measure.intervals import Interval, median_interval

FEWEST_PAIRS = 12  # six blocks: the least for which [smallest, largest] covers a median with 95 %


@dataclass(frozen=True)
class Plan:
    """How long to measure: pairs of the pilot and at most, the wanted width of the interval, seconds, warm-up runs.

    `width` is high end over low end, less 1. `warm_ups` bounds the runs of each arm that precede the pilot.
    """

    pilot: int
    most: int
    width: float
    budget: float = math.inf
    warm_ups: int = 20


PLANS = {
    "quick": Plan(pilot=12, most=20, width=0.10, budget=2.0, warm_ups=5),
    "standard": Plan(pilot=20, most=120, width=0.05, budget=6.0, warm_ups=20),
    "full": Plan(pilot=40, most=400, width=0.02, budget=60.0, warm_ups=50),
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
    """Seconds of both arms in the order in which they were taken, two of each a block; `stopped` says why it ended."""

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    stopped: str = "width"

    @property
    def ratios(self) -> list[float]:
        """Logarithms of baseline over candidate, one for each block of two pairs."""
        logs = [math.log(a / b) for a, b in zip(self.baseline, self.candidate, strict=True)]
        return [(logs[i] + logs[i + 1]) / 2 for i in range(0, len(logs) - 1, 2)]

    @property
    def speedup(self) -> Interval:
        """How many times faster the candidate is."""
        return median_interval(self.ratios)


def warm_up(clock: Clock, work: Work, *, most: int, steady: float = 0.1) -> None:
    """Run `work` until two runs in a row differ by less than `steady`, relative; at most `most` runs."""
    before = clock.seconds(work)
    for _ in range(most):
        now = clock.seconds(work)
        if abs(now - before) <= steady * before:
            return
        before = now


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector, which strikes whichever arm happens to run, out of the measurement."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compare(
    clock: Clock,
    baseline: Work,
    candidate: Work,
    plan: Plan,
    *,
    before: Callable[[], object] | None = None,
    progress: Callable[[Progress], object] | None = None,
    now: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> Comparison:
    """Time both arms in turn, in blocks ABBA or BAAB as a coin falls, after warming both up.

    Blocks are taken until the plan's width is expected to be reached, its number of pairs is, or its budget is spent.
    `before` runs untimed before every timed run (a Flush).
    """
    coin = random.Random(seed)
    arms: dict[str, tuple[Work, list[float]]] = {"A": (baseline, []), "B": (candidate, [])}
    with _no_collection():
        warm_up(clock, baseline, most=plan.warm_ups)
        warm_up(clock, candidate, most=plan.warm_ups)
        start = now()
        stopped = "most"
        for done in range(0, plan.most, 2):
            if done >= FEWEST_PAIRS and now() - start > plan.budget:
                stopped = "budget"
                break
            for arm in coin.choice(("ABBA", "BAAB")):
                if before is not None:
                    before()
                work, seconds = arms[arm]
                seconds.append(clock.seconds(work))
            if progress is not None:
                seen = Comparison(tuple(arms["A"][1]), tuple(arms["B"][1]))
                elapsed = now() - start
                progress(
                    Progress(
                        done + 2,
                        plan.most,
                        seen.speedup if done + 2 >= FEWEST_PAIRS else None,
                        min(plan.budget - elapsed, elapsed / (done + 2) * (plan.most - done - 2)),
                    )
                )
    return Comparison(tuple(arms["A"][1]), tuple(arms["B"][1]), stopped)
