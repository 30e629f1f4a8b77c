"""Autocast registrations that are lost or moved: a sample of them is caught, each by the contract of its overload."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.harness.targets import FAKE_DEVICE_TYPES
from tests.faults.campaigns.generated import KINDS, Generated, Outcome, faults, main, sample, table, wrong

MM = Generated("cuda", "mm", "fp32")


def test_sample_is_caught_with_no_failure_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "faults.md"

    status = main(["--sample", "60", "--workers", "1", "-o", str(page)])

    assert status == 0, capsys.readouterr().out
    assert "60 faults" in page.read_text()


def test_sample_has_every_backend_and_kind_and_is_the_same_each_time() -> None:
    whole = faults()
    chosen = sample(whole, 60)

    assert chosen == sample(list(reversed(whole)), 60)
    assert len(set(chosen)) == 60
    assert {fault.backend for fault in chosen} == set(FAKE_DEVICE_TYPES)
    assert {fault.kind for fault in chosen} == set(KINDS) - {"fp32_append_dtype"}  # which no other overload can have


def test_every_registration_is_dropped_and_moved_but_not_to_its_own_policy() -> None:
    kinds = {fault.kind for fault in faults(["cuda"]) if fault.overload == "sum"}

    assert kinds == {"dropped", "idle", "lower_precision", "fp32", "widest", "banned"}


def test_missed_fault_is_told() -> None:
    assert wrong([Outcome(MM, None, (), ())]) == ["MISSED mm on cuda: fp32"]


def test_failure_of_another_overload_is_told() -> None:
    outcome = Outcome(MM, "quick", ("AMP-CAST-038",), ("exp: ContractViolation",))

    assert wrong([outcome]) == ["FALSE ALARM of mm on cuda: fp32: exp: ContractViolation"]


def test_table_counts_what_the_policys_own_contract_caught() -> None:
    by_policy = Outcome(MM, "quick", ("AMP-CAST-038",), ())
    by_accounting = Outcome(Generated("cuda", "bmm", "fp32"), "quick", ("AMP-CAST-036",), ())

    (*_, last) = table([by_policy, by_accounting]).splitlines()

    assert [cell.strip() for cell in last.strip("|").split("|")] == ["all", "all", "2", "2", "1", "0", "0", "0", "0"]
