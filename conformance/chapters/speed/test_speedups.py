"""Check the speed of operations and training steps under AMP against fp32 with TF32 off and on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ...harness.check import Case, contract, deep, timed
from ...harness.expectations import Expectations
from ...harness.targets import Target, device_module
from . import clocks, experiment, intervals, paired_comparison, peak_rates, tf32, timing, verdict
from .experiment import Experiment, Experiments
from .operations import OPERATIONS, linear
from .training_steps import STEPS

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = (16, 64, 256, 1024, 4096), 4096  # of the Linear whose break-even is looked for


@pytest.fixture(scope="session")
def measured() -> Experiments:
    """Share the measurements among cases: several contracts use one measurement."""
    # The first optimizer imports modules for some seconds, which are no case's.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return Experiments()


@contract("AMP-SPEED-001", on="accelerator")
@timed
def test_matmul_against_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    verdict.judge(case, target, measured, expectations, [Experiment("matmul", "compute", amp_dtype, "fp32")])


@contract("AMP-SPEED-002", on="accelerator")
@timed
def test_matmul_against_tf32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    verdict.judge(case, target, measured, expectations, [Experiment("matmul", "compute", amp_dtype, "tf32")])


@contract("AMP-SPEED-030", on="accelerator")
@timed
@pytest.mark.parametrize(("subject", "size", "baseline"), experiment.matrix(OPERATIONS))
def test_operations(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, subject: str, size: str, baseline: str
) -> None:
    verdict.record(case, measured.measure(case, target, Experiment(subject, size, amp_dtype, baseline)))


@contract("AMP-SPEED-031", on="accelerator")
@timed
@pytest.mark.parametrize("subject", [deep("standard", subject) for subject in OPERATIONS])
def test_operations_as_expected(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    measured: Experiments,
    expectations: Expectations,
    subject: str,
) -> None:
    verdict.judge(case, target, measured, expectations, experiment.measured_at(case.level, subject, amp_dtype))


@contract("AMP-SPEED-032", on="accelerator")
@timed
@pytest.mark.parametrize("baseline", [deep("standard", "fp32"), deep("full", "tf32")])
def test_break_even(case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, baseline: str) -> None:
    clock = clocks.device_clock(target.device_type, device_module(target.device_type))
    # Each number of rows is timed twice: against fp32, and against itself for the noise floor.
    plan = timing.within(paired_comparison.PLANS["quick"], case.allowance / (4 * len(ROWS)))
    spec = Experiment("linear", "compute", amp_dtype, baseline)
    ratios: dict[int, intervals.Interval] = {}
    with tf32.precision(case, target, baseline), experiment.broken_timing():
        most = linear(max(ROWS), WIDTH, WIDTH)
        measured.demand_time(case, target, f"a Linear on {max(ROWS)} rows", most.flops, amp_dtype, plan)
        before = timing.flush(target)
        for rows in ROWS:
            arms = experiment.arms(target, spec, linear(rows, WIDTH, WIDTH))
            name = f"break-even of a Linear, {rows} rows"
            taken = timing.take(case, target, clock, arms, plan, name=name, before=before)
            if taken.invalid is not None:
                case.note(f"{rows} rows: measurement invalid", taken.invalid)
            ratios[rows] = ratio = taken.speedup
            case.note(f"{rows} rows: low end, median, high end of the ratio", [ratio.low, ratio.estimate, ratio.high])
    won = [rows for rows, ratio in ratios.items() if ratio.low >= 1]
    lost = [rows for rows, ratio in ratios.items() if ratio.high < 1]
    case.note("AMP is faster from this many rows on, of those tried", min(won, default="none"))
    case.note("AMP is slower up to this many rows, of those tried", max(lost, default="none"))
    predicted = experiment.break_even(target, spec, peak_rates.ceilings(target.device))
    case.note("break-even as the device's rates predict it", "unknown" if predicted is None else predicted, "rows")


@contract("AMP-SPEED-005", on="cpu")
@timed
@pytest.mark.parametrize("size", ["middle", deep("full", "compute")])
@pytest.mark.parametrize("subject", ["matmul", *(deep("standard", subject) for subject in OPERATIONS[1:])])
def test_operations_on_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, subject: str, size: str
) -> None:
    verdict.record(case, measured.measure(case, target, Experiment(subject, size, amp_dtype, "fp32")))


@contract("AMP-SPEED-031", on="cpu")
@timed
def test_operations_on_the_cpu_as_expected(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    candidates = experiment.measured_on_a_cpu(case.level, OPERATIONS, amp_dtype)
    verdict.judge(case, target, measured, expectations, candidates)


@contract("AMP-SPEED-007")
@timed
@pytest.mark.parametrize("kind", ["device", deep("standard", "step")])
def test_noise_floor(case: Case, target: Target, measured: Experiments, kind: str) -> None:
    on_device = kind == "device"
    spec = Experiment(*(("matmul", "middle") if on_device else ("step-mlp", "small")), torch.float16, "fp32")
    make = clocks.device_clock if on_device else clocks.step_clock
    clock = make(target.device_type, device_module(target.device_type))
    pairs = case.samples(quick=10, standard=30, full=200)
    plan = replace(experiment.plan_of(case, target), pilot=pairs, most=pairs)
    subject = spec.make(target.device_type)
    with experiment.broken_timing():
        measured.demand_time(case, target, spec.key, subject.flops, spec.dtype, plan)
        work, _ = experiment.arms(target, spec, subject)
        before = timing.flush(target) if on_device else None
        name = "two equal arms"
        taken = timing.take(case, target, clock, (work, work), plan, name=name, before=before, floor=lambda: 0.0)
    speedup = taken.speedup
    case.note("clock", clock.name)
    case.note("pairs", len(taken.comparison.baseline))
    case.note("ratio of two equal arms: low end, median, high end", [speedup.low, speedup.estimate, speedup.high])
    case.note("confidence of the interval", speedup.coverage)
    for fact, value in taken.facts.items():
        case.note(fact, value)
    if taken.invalid is not None:
        case.note("measurement invalid", taken.invalid)
    case.timings(taken.comparison.candidate, {"low": speedup.low, "ratio": speedup.estimate, "high": speedup.high})


@contract("AMP-SPEED-003", on="accelerator")
@timed
def test_training_against_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    verdict.judge(case, target, measured, expectations, [Experiment("step-mlp", "compute", amp_dtype, "fp32")])


@contract("AMP-SPEED-004", on="accelerator")
@timed
def test_training_against_tf32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    verdict.judge(case, target, measured, expectations, [Experiment("step-mlp", "compute", amp_dtype, "tf32")])


@contract("AMP-SPEED-040", on="accelerator")
@timed
@pytest.mark.parametrize(("subject", "size", "baseline"), experiment.matrix(STEPS))
def test_steps(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, subject: str, size: str, baseline: str
) -> None:
    verdict.record(case, measured.measure(case, target, Experiment(subject, size, amp_dtype, baseline)))


@contract("AMP-SPEED-041", on="accelerator")
@timed
@pytest.mark.parametrize("subject", [deep("standard", subject) for subject in STEPS])
def test_steps_as_expected(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    measured: Experiments,
    expectations: Expectations,
    subject: str,
) -> None:
    verdict.judge(case, target, measured, expectations, experiment.measured_at(case.level, subject, amp_dtype))


@contract("AMP-SPEED-006", on="cpu")
@timed
@pytest.mark.parametrize("size", ["small", deep("full", "compute")])
@pytest.mark.parametrize("subject", ["step-mlp", *(deep("standard", subject) for subject in STEPS[1:])])
def test_steps_on_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, subject: str, size: str
) -> None:
    verdict.record(case, measured.measure(case, target, Experiment(subject, size, amp_dtype, "fp32")))


@contract("AMP-SPEED-041", on="cpu")
@timed
def test_steps_on_the_cpu_as_expected(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Experiments, expectations: Expectations
) -> None:
    candidates = experiment.measured_on_a_cpu(case.level, STEPS, amp_dtype)
    verdict.judge(case, target, measured, expectations, candidates)
