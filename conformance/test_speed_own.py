"""How long a training step of a model of the user's own takes."""

from __future__ import annotations

import os
import statistics
from contextlib import nullcontext

import torch

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target, device_module
from conformance.measure.clocks import Work, step_clock
from conformance.measure.comparison import Plan, compare
from conformance.workloads.own import Builder
from conformance.workloads.training import train_step


@contract("AMP-SPEED-020")
def test_step_against_fp32(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        case.untestable("speed is measured alone: run this chapter without -n")
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    clock = step_clock(target.device_type, device_module(target.device_type))
    seen = compare(
        clock,
        _arm(case, target, own, None),
        _arm(case, target, own, amp_dtype),
        Plan(
            pilot=12,
            most=case.samples(quick=12, standard=20, full=50),
            width=0.05,
            budget=case.samples(quick=2, standard=10, full=60),
            warm_ups=5,
        ),
    )
    for name, seconds in (("fp32", seen.baseline), ("AMP", seen.candidate)):
        case.note(f"{name}: median time of a step", statistics.median(seconds) * 1e3, "ms")
    speedup = seen.speedup
    case.note("pairs", len(seen.baseline))
    case.note("speed-up: low end, median, high end", [speedup.low, speedup.estimate, speedup.high])
    case.note("confidence of the interval", speedup.coverage)
    if target.device_type == "cuda":
        case.note("TF32 in fp32 products", torch.backends.cuda.matmul.allow_tf32)


def _arm(case: Case, target: Target, own: Builder, dtype: torch.dtype | None) -> Work:
    work = own.build(target.device, case.seed).workload()
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)
    numbers = iter(range(10**9))

    def step() -> None:
        train_step(work, next(numbers), lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)

    return step
