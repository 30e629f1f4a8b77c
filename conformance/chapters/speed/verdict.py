"""Record a measured speed-up as evidence, and judge it by the expectation for its device class."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...harness.check import Case
from ...harness.endings import Inconclusive, Unsupported, Untestable
from ...harness.expectations import DeviceClass, Expectation, Expectations
from ...harness.targets import Target
from ...harness.waivers import today
from . import diagnosis
from .experiment import Experiment, Experiments, Measurement, matrix_units

WELL_ABOVE = 8  # times the break-even: from there on casts cost AMP an eighth of its gain at most


def record(case: Case, measurement: Measurement) -> None:
    """Record a measurement as evidence, and pass its times to pytest-benchmark.

    Ends the case where there was no time for an interval.
    """
    if (reason := _record_figures(case, measurement)) is not None:
        case.inconclusive(reason)
    case.timings(measurement.comparison.candidate, {"key": measurement.experiment.key, **measurement.reported()})


def _record_figures(case: Case, measurement: Measurement) -> str | None:
    """Record a measurement as evidence; return the reason if there is no interval."""
    speedup, key = measurement.speedup, measurement.experiment.key
    if measurement.has_interval:
        case.speedup(key, measurement.reported())
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
    """Return the expectations for the target's class; ends the case if there are none."""
    device = (target.device_type, str(target.probe["name"]), target.probe["capability"])
    found = expectations.of(*device, today())
    if found is None and matrix_units(target) is False:
        case.unsupported("the device has no tensor cores, for which there is no expectation")
    if found is None:
        case.unsupported(f"{expectations.why_none(*device, today())}: its speed-ups are recorded, not judged")
    assert found is not None
    return found


def judge(
    case: Case, target: Target, experiments: Experiments, expectations: Expectations, candidates: Iterable[Experiment]
) -> None:
    """Judge every experiment that has an expectation; ends the case if none has.

    A failure counts before a measurement that decides nothing, and that before those that hold.
    """
    known = device_class(case, target, expectations)
    expected = [(spec, wanted) for spec in candidates if (wanted := known.expected(spec.key)) is not None]
    if not expected:
        case.unsupported(f"there is no expectation for this in {known.id}: its speed-ups are recorded, not judged")
    undecided: dict[type[Exception], list[str]] = {}
    for place, (spec, wanted) in enumerate(expected):
        try:
            seen = experiments.measure(case, target, spec, len(expected) - place)
        except (Inconclusive, Untestable, Unsupported) as ended:
            undecided.setdefault(type(ended), []).append(str(ended))
            continue
        if (reason := _judged(case, seen, wanted)) is not None:
            undecided.setdefault(Inconclusive, []).append(reason)
    for ending in (Inconclusive, Untestable, Unsupported):  # the weightiest that there was
        if ending in undecided:
            raise ending("; ".join(reason for reasons in undecided.values() for reason in reasons))


def _judged(case: Case, seen: Measurement, wanted: Expectation) -> str | None:
    """Judge one measurement by its expectation; raise if it fails, return the reason if it decides nothing."""
    key = seen.experiment.key
    missing = _record_figures(case, seen)
    case.note(f"{key}: expected", str(wanted))
    if seen.invalid is not None:
        return f"{key}: {seen.invalid}"
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
    """Return whether a batch that was halved is large enough for what is expected of large ones."""
    if figures.rows is None or figures.break_even is None:
        return False
    return figures.rows >= WELL_ABOVE * figures.break_even
