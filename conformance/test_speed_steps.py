"""Speed of training steps: AMP against fp32 with TF32 off and on, as the host waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.harness.check import Case, contract, deep, timed
from conformance.harness.expectations import Expectations
from conformance.harness.targets import Target
from conformance.judging import contests, rulings
from conformance.judging.contests import Contest, Contests
from conformance.measure.threads import one_thread
from conformance.workloads.timed_steps import STEPS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def measured() -> Contests:
    """What the cases of this module have measured: several contracts speak of one measurement."""
    # The first optimizer imports modules for some seconds, which are no case's.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return Contests()


@contract("AMP-SPEED-003", on="accelerator")
@timed
def test_training_against_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    rulings.judge(case, target, measured, expectations, [Contest("step-mlp", "compute", amp_dtype, "fp32")])


@contract("AMP-SPEED-004", on="accelerator")
@timed
def test_training_against_tf32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    rulings.judge(case, target, measured, expectations, [Contest("step-mlp", "compute", amp_dtype, "tf32")])


@contract("AMP-SPEED-040", on="accelerator")
@timed
@pytest.mark.parametrize(("subject", "size", "baseline"), contests.matrix(STEPS))
def test_steps(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, subject: str, size: str, baseline: str
) -> None:
    rulings.record(case, measured.measure(case, target, Contest(subject, size, amp_dtype, baseline)))


@contract("AMP-SPEED-041", on="accelerator")
@timed
@pytest.mark.parametrize("subject", [deep("standard", subject) for subject in STEPS])
def test_steps_as_expected(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    measured: Contests,
    expectations: Expectations,
    subject: str,
) -> None:
    rulings.judge(case, target, measured, expectations, contests.measured_at(case.level, subject, amp_dtype))


@contract("AMP-SPEED-006", on="cpu")
@timed
@pytest.mark.parametrize("size", ["small", deep("full", "compute")])
@pytest.mark.parametrize("subject", ["step-mlp", *(deep("standard", subject) for subject in STEPS[1:])])
def test_steps_on_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, subject: str, size: str
) -> None:
    rulings.record(case, measured.measure(case, target, Contest(subject, size, amp_dtype, "fp32")))


@contract("AMP-SPEED-041", on="cpu")
@timed
def test_steps_on_the_cpu_as_expected(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    candidates = contests.measured_on_a_cpu(case.level, STEPS, amp_dtype)
    rulings.judge(case, target, measured, expectations, candidates)
