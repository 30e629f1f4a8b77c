"""Speed of single operations: AMP against fp32 with TF32 off and on, from bound by launches to bound by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance import contests, rulings
from conformance.contests import Contest, Contests
from conformance.harness.check import Case, contract, deep, timed
from conformance.harness.expectations import Expectations
from conformance.harness.targets import Target
from conformance.measure.threads import one_thread
from conformance.workloads.timed_operations import OPERATIONS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def measured() -> Contests:
    """What the cases of this module have measured: several contracts speak of one measurement."""
    return Contests()


@contract("AMP-SPEED-001", on="accelerator")
@timed
def test_matmul_against_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    rulings.judge(case, target, measured, expectations, [Contest("matmul", "compute", amp_dtype, "fp32")])


@contract("AMP-SPEED-002", on="accelerator")
@timed
def test_matmul_against_tf32(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    rulings.judge(case, target, measured, expectations, [Contest("matmul", "compute", amp_dtype, "tf32")])


@contract("AMP-SPEED-030", on="accelerator")
@timed
@pytest.mark.parametrize(("subject", "size", "baseline"), contests.matrix(OPERATIONS))
def test_operations(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, subject: str, size: str, baseline: str
) -> None:
    rulings.record(case, measured.measure(case, target, Contest(subject, size, amp_dtype, baseline)))


@contract("AMP-SPEED-031", on="accelerator")
@timed
@pytest.mark.parametrize("subject", [deep("standard", subject) for subject in OPERATIONS])
def test_operations_as_expected(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    measured: Contests,
    expectations: Expectations,
    subject: str,
) -> None:
    rulings.judge(case, target, measured, expectations, contests.measured_at(case.level, subject, amp_dtype))


@contract("AMP-SPEED-032", on="accelerator")
@timed
@pytest.mark.parametrize("baseline", [deep("standard", "fp32"), deep("full", "tf32")])
def test_break_even(case: Case, target: Target, amp_dtype: torch.dtype, baseline: str) -> None:
    contests.sweep(case, target, amp_dtype, baseline)


@contract("AMP-SPEED-005", on="cpu")
@timed
@pytest.mark.parametrize("size", ["middle", deep("full", "compute")])
@pytest.mark.parametrize("subject", ["matmul", *(deep("standard", subject) for subject in OPERATIONS[1:])])
def test_operations_on_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, subject: str, size: str
) -> None:
    rulings.record(case, measured.measure(case, target, Contest(subject, size, amp_dtype, "fp32")))


@contract("AMP-SPEED-031", on="cpu")
@timed
def test_operations_on_the_cpu_as_expected(
    case: Case, target: Target, amp_dtype: torch.dtype, measured: Contests, expectations: Expectations
) -> None:
    candidates = contests.measured_on_a_cpu(case.level, OPERATIONS, amp_dtype)
    rulings.judge(case, target, measured, expectations, candidates)


@contract("AMP-SPEED-007")
@timed
@pytest.mark.parametrize("kind", ["device", deep("standard", "step")])
def test_noise_floor(case: Case, target: Target, kind: str) -> None:
    contests.equal_arms(case, target, kind)
