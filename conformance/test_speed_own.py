"""How long a training step of a model of the user's own takes."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import replace

import torch

from conformance.harness.check import Case, contract, timed
from conformance.harness.targets import DTYPE_NAMES, Target, device_module
from conformance.measure.clocks import Work, step_clock
from conformance.measure.comparison import PLANS, compare
from conformance.workloads.own import Builder
from conformance.workloads.training import train_step

BUDGETS = {
    "quick": 4.0,
    "standard": 15.0,
    "full": 60.0,
}  # seconds; nobody knows how long a step of a user's model takes


@contract("AMP-SPEED-020")
@timed
def test_step_against_fp32(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    clock = step_clock(target.device_type, device_module(target.device_type))
    plan = replace(PLANS[case.level], budget=min(BUDGETS[case.level], case.allowance), warm_ups=5)
    seen = compare(clock, _arm(case, target, own, None), _arm(case, target, own, amp_dtype), plan)
    for name, seconds in (("fp32", seen.baseline), ("AMP", seen.candidate)):
        case.note(f"{name}: median time of a step", statistics.median(seconds) * 1e3, "ms")
    speedup = seen.speedup
    case.note("pairs", len(seen.baseline))
    if not speedup.low > 0:
        case.inconclusive(
            f"{len(seen.baseline)} pairs of steps in {plan.budget:.1f} s are too few for an interval; a deeper level "
            f"has more time; the medians have the ratio {speedup.estimate:.3g}"
        )
    tf32 = target.device_type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    figures = {
        "ratio": speedup.estimate,
        "low": speedup.low,
        "high": speedup.high,
        "confidence": speedup.coverage,
        "fp32 ms": statistics.median(seen.baseline) * 1e3,
        "AMP ms": statistics.median(seen.candidate) * 1e3,
    }
    case.speedup(f"own/step/{DTYPE_NAMES[amp_dtype]}/{'tf32' if tf32 else 'fp32'}", figures)
    case.timings(seen.candidate, figures)


def _arm(case: Case, target: Target, own: Builder, dtype: torch.dtype | None) -> Work:
    work = own.build(target.device, case.seed).workload()
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)
    numbers = iter(range(10**9))

    def step() -> None:
        train_step(work, next(numbers), lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)

    return step
