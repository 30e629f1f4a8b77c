"""Record the time of a training step of a user's model, AMP against fp32."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch

from ...harness.check import Case, contract, timed, trains
from ...harness.targets import DTYPE_NAMES, Target, device_module
from ...workloads.training import train_step
from ...workloads.user_workload import Builder
from . import diagnosis, profile, timing
from .clocks import Work, step_clock
from .experiment import broken_timing, clock_mhz, fp32_ops, matrix_units
from .paired_comparison import FEWEST_PAIRS, PLANS
from .tf32 import has_tf32_flags, tf32_in_effect

BUDGETS = {
    "quick": 8.0,
    "standard": 30.0,
    "full": 120.0,
}  # seconds, at most; nobody knows how long a step of a user's model takes


@contract("AMP-SPEED-020")
@trains(fewest=4, quick=80, standard=340, full=1600)
@timed
def test_step_against_fp32(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    clock = step_clock(target.device_type, device_module(target.device_type))
    # Half of the time is for the noise floor: two equal arms.
    plan = replace(PLANS[case.level], budget=min(BUDGETS[case.level], case.allowance) / 2, warm_ups=5)
    full, low = (own.paces[target.device, dtype].step for dtype in (None, amp_dtype))
    # Both comparisons: two arms of AMP, and one of each; each arm is warmed up by a step.
    least = (1 + FEWEST_PAIRS) * (full + 3 * low)
    if least > 2 * plan.budget:
        case.inconclusive(
            f"{FEWEST_PAIRS} pairs of steps and as many of two equal arms take about {least:.0f} s, of which there are "
            f"{2 * plan.budget:.0f}; a deeper level, or a smaller batch, would decide"
        )
    arms = _arm(case, target, own, None), _arm(case, target, own, amp_dtype)
    with broken_timing():
        taken = timing.take(case, target, clock, arms, plan, name="a step of the workload")
    seen, speedup = taken.comparison, taken.speedup
    for name, seconds in (("fp32", seen.baseline), ("AMP", seen.candidate)):
        if seconds:
            case.note(f"{name}: median time of a step", statistics.median(seconds) * 1e3, "ms")
    case.note("pairs", len(seen.baseline))
    if not 0 < speedup.low <= speedup.high < math.inf:
        case.inconclusive(
            f"{len(seen.baseline)} pairs of steps in {plan.budget:.1f} s are too few for an interval or for the "
            f"noise floor; a deeper level has more time; the medians have the ratio {speedup.estimate:.3g}"
        )
    # Switched by the user or their model; seen, as there are more ways to ask for it than one.
    tf32 = has_tf32_flags(target) and tf32_in_effect(target.device)
    diagnosed = _diagnosed(target, taken, arms[1], "tf32" if tf32 else "fp32")
    figures = {
        "ratio": speedup.estimate,
        "low": speedup.low,
        "high": speedup.high,
        "confidence": speedup.coverage,
        "noise": taken.floor,
        "fp32 ms": statistics.median(seen.baseline) * 1e3,
        "AMP ms": statistics.median(seen.candidate) * 1e3,
        **({} if taken.invalid is None else {"spoiled": taken.invalid}),
        **taken.facts,
        "diagnosis": diagnosis.line(diagnosed),
    }
    case.speedup(f"own/step/{DTYPE_NAMES[amp_dtype]}/{diagnosed.baseline}", figures)
    case.timings(seen.candidate, {"workload": own.name, **figures})


def _diagnosed(target: Target, taken: timing.Timing, amp: Work, baseline: str) -> diagnosis.Figures:
    """Return what explains the ratio; of a user's model nobody knows the operations and the rows of its weights."""
    seen = profile.observe(amp, target.device_type, fp32_ops(target.device_type))
    return diagnosis.Figures(
        baseline=baseline,
        speedup=taken.speedup.estimate,
        step_seconds=statistics.median(taken.comparison.candidate),
        device_seconds=seen.total if seen is not None and seen.where == "device" else None,
        cast_share=seen.cast_share if seen else None,
        fp32_share=seen.fp32_share if seen else None,
        largest_fp32_op=seen.largest_fp32_op if seen else None,
        clock_mhz=clock_mhz(taken.facts),
        matrix_units=matrix_units(target),
        has_tf32=has_tf32_flags(target),
    )


def _arm(case: Case, target: Target, own: Builder, dtype: torch.dtype | None) -> Work:
    built = own.build(target.device, case.seed)
    work, scaler = built.workload(), built.scaler(dtype)
    numbers = iter(range(10**9))

    def step() -> None:
        train_step(work, next(numbers), lambda: built.region(dtype), scaler)

    return step
