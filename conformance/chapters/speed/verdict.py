"""Rulings: a measured speed-up told in the evidence, and held against what is expected of its class of device."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...harness.check import Case, Inconclusive, Unsupported, Untestable
from ...harness.expectations import DeviceClass, Expectation, Expectations
from ...harness.targets import Target
from ...harness.waivers import today
from . import diagnosis
from .experiment import Contest, Contests, Measurement, matrix_units

WELL_ABOVE = 8  # times the break-even: from there on casts cost AMP an eighth of its gain at most


def record(case: Case, measurement: Measurement) -> None:
    """Put a measurement into the evidence, and hand its times to pytest-benchmark.

    Ends the case where there was no time for an interval.
    """
    if (reason := tell(case, measurement)) is not None:
        case.inconclusive(reason)
    case.timings(measurement.comparison.candidate, {"key": measurement.contest.key, **measurement.told()})


def tell(case: Case, measurement: Measurement) -> str | None:
    """Put a measurement into the evidence; returns why there is no interval, where there is none."""
    speedup, key = measurement.speedup, measurement.contest.key
    if measurement.has_interval:
        case.speedup(key, measurement.told())
        return None
    case.note(f"{key}: ratio of the medians", speedup.estimate)
    pairs = len(measurement.comparison.baseline)
    missing = (
        f"there were {pairs} pairs, too few for an interval"
        if math.isfinite(measurement.floor)
        else f"two equal arms had too few pairs for a noise floor, without which {pairs} pairs of this decide nothing"
    )
    return (
        f"{key}: in the time that is left to it {missing}; a deeper level has more time, --contract leaves fewer cases"
    )


def device_class(case: Case, target: Target, expectations: Expectations) -> DeviceClass:
    """What is expected of the target; ends the case where nothing is."""
    device = (target.device_type, str(target.probe["name"]), target.probe["capability"])
    found = expectations.of(*device, today())
    if found is None and matrix_units(target) is False:
        case.unsupported("the device has no tensor cores, and nothing is promised without them")
    if found is None:
        case.unsupported(f"{expectations.why_none(*device, today())}: its speed-ups are recorded, not judged")
    assert found is not None
    return found


def judge(
    case: Case, target: Target, contests: Contests, expectations: Expectations, candidates: Iterable[Contest]
) -> None:
    """Hold every contest of which something is expected against it; ends the case where there is none.

    A failure counts before a measurement that decides nothing, and that before those that hold.
    """
    known = device_class(case, target, expectations)
    expected = [(contest, wanted) for contest in candidates if (wanted := known.expected(contest.key)) is not None]
    if not expected:
        case.unsupported(f"the expectations for {known.id} say nothing of this: its speed-ups are recorded, not judged")
    undecided: dict[type[Exception], list[str]] = {}
    for place, (contest, wanted) in enumerate(expected):
        try:
            seen = contests.measure(case, target, contest, len(expected) - place)
        except (Inconclusive, Untestable, Unsupported) as ended:
            undecided.setdefault(type(ended), []).append(str(ended))
            continue
        if (reason := _judged(case, seen, wanted)) is not None:
            undecided.setdefault(Inconclusive, []).append(reason)
    for ending in (Inconclusive, Untestable, Unsupported):  # the weightiest that there was
        if ending in undecided:
            raise ending("; ".join(reason for reasons in undecided.values() for reason in reasons))


def _judged(case: Case, seen: Measurement, wanted: Expectation) -> str | None:
    """Hold one measurement against what is expected; raises where it misses, returns why it decides nothing."""
    key = seen.contest.key
    missing = tell(case, seen)
    case.note(f"{key}: expected", str(wanted))
    if seen.spoiled is not None:
        return f"{key}: {seen.spoiled}"
    if missing is not None:
        return missing
    if seen.shrink and not _still_large(seen.figures):
        return (
            f"{key} fitted only at a batch {2**seen.shrink} times smaller, for want of memory or time; there, near the "
            "break-even, it was recorded and not judged"
        )
    verdict = seen.speedup.judge(wanted.factor)
    if verdict is None:
        ends = f"[{seen.speedup.low:.3g}, {seen.speedup.high:.3g}]"
        return f"{key}: the ratio of {seen.speedup.estimate:.3g} lies in {ends}, and {wanted.factor:.4g} is inside"
    # Of a ratio that misses, the end that is nearest to what is expected.
    end, value = ("low", seen.speedup.low) if verdict else ("high", seen.speedup.high)
    case.at_least(f"{key}: {end} end of the ratio; {seen.diagnosis}", value, wanted.factor)
    return None


def _still_large(figures: diagnosis.Figures) -> bool:
    """Whether a batch that was halved is large enough for what is expected of large ones."""
    if figures.rows is None or figures.break_even is None:
        return False
    return figures.rows >= WELL_ABOVE * figures.break_even
