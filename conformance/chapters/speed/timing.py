"""Time two arms while monitoring the machine, with a noise floor from two equal arms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...harness.check import Case
from ...harness.targets import Target
from . import cache_flush, clocks, intervals, machine_conditions, paired_comparison

ARITHMETIC = 20e-3  # seconds of small work that are not its launches: some ten of these take some hundred microseconds


@dataclass(frozen=True)
class Timing:
    """A comparison with its noise floor, the reason why it is invalid (None: valid), and its conditions."""

    comparison: paired_comparison.Comparison
    floor: float
    invalid: str | None
    facts: dict[str, object]

    @property
    def speedup(self) -> intervals.Interval:
        """How many times faster the candidate is, no finer than two equal arms differ."""
        return self.comparison.speedup.widened(self.floor)


def take(
    case: Case,
    target: Target,
    clock: clocks.Clock,
    arms: tuple[clocks.Work, clocks.Work],
    plan: paired_comparison.Plan,
    *,
    name: str,
    before: Callable[[], object] | None = None,
    floor: Callable[[], float] | None = None,
) -> Timing:
    """Time a baseline and a candidate alternately, and show the progress of `name`.

    `floor` returns a known noise floor; without it the candidate is timed against itself, by the same plan.
    """
    before_it = _runs(clock)
    with machine_conditions.Watch(target.device) as watch:

        def show(now: paired_comparison.Progress) -> None:
            if now.done % paired_comparison.REPORT_EVERY == 0:  # a look takes the driver some time
                watch.sample()
            case.progress(f"{name}: {_words(now)}")

        found = noise_floor(case, clock, arms[1], plan, name=name, before=before) if floor is None else floor()
        seed = f"{case.seed} {name}"
        seen = paired_comparison.compare(clock, *arms, plan, before=before, progress=show, now=case.now, seed=seed)
    disturbed = watch.invalid(waiting=_counts_waiting(clock, *before_it))
    drifted = paired_comparison.drifted(seen, seen.speedup.widened(found))
    facts = watch.facts() | (before.facts if isinstance(before, cache_flush.Flush) else {})
    return Timing(seen, found, "; ".join(filter(None, (disturbed, drifted))) or None, facts)


def _runs(clock: clocks.Clock) -> tuple[int, int]:
    """Return how many runs a clock of the device has timed, and how many of them the host may have held up."""
    return (clock.runs, clock.exposed) if isinstance(clock, clocks.EventClock) else (0, 0)


def _counts_waiting(clock: clocks.Clock, runs: int, exposed: int) -> bool:
    """Return whether a clock has counted time, since that many runs, in which other processes had the processor.

    That of the processor's own time does not; nor does the device's where all was queued before it began, but for as
    few runs as tell nothing.
    """
    if isinstance(clock, clocks.EventClock):
        later, late = (now - then for now, then in zip(_runs(clock), (runs, exposed), strict=True))
        return late > machine_conditions.DISTURBED * later
    return not isinstance(clock, clocks.ProcessorClock)


def noise_floor(
    case: Case,
    clock: clocks.Clock,
    work: clocks.Work,
    plan: paired_comparison.Plan,
    *,
    name: str,
    before: Callable[[], object] | None = None,
) -> float:
    """Return what two equal arms differ by, in logarithmic units; infinite if there was no time for an interval."""

    def show(now: paired_comparison.Progress) -> None:
        case.progress(f"{name}, both arms equal: {_words(now)}")

    seen = paired_comparison.compare(clock, work, work, plan, before=before, progress=show, now=case.now)
    return intervals.noise_floor(seen.speedup)


def _words(now: paired_comparison.Progress) -> str:
    known = now.interval
    ratio = f", ratio {known.estimate:.3g} in [{known.low:.3g}, {known.high:.3g}]" if known else ""
    left = f", {now.seconds_left:.0f} s left" if math.isfinite(now.seconds_left) else ""
    return f"{now.done} of {now.planned} pairs{ratio}{left}"


def flush(target: Target) -> Callable[[], object] | None:
    """Return what flushes the last-level cache before a run; None on a CPU, whose caches are part of its work."""
    if target.device_type == "cpu":
        return None
    return cache_flush.Flush(target.device, *cache_flush.last_level_bytes(target.device))


def within(plan: paired_comparison.Plan, seconds: float) -> paired_comparison.Plan:
    """Return the plan, in that many seconds at most."""
    return replace(plan, budget=min(plan.budget, seconds))
