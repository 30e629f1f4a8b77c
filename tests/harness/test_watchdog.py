"""A case that hangs is ended with its stack and named: among workers the run goes on, alone it ends INCOMPLETE."""

from __future__ import annotations

import pytest

from conformance.harness.watchdog import SECONDS
from tests.conftest import Toy

_CHECKS = """
import time

@contract("AMP-API-001")
def test_before(case: Case) -> None:
    case.true("ran", True)

@contract("AMP-API-002")
def test_hangs(case: Case) -> None:
    def waits_for_ever():
        time.sleep(600)
    waits_for_ever()

@contract("AMP-API-003")
@pytest.mark.parametrize("number", range(20))
def test_after(case: Case, number: int) -> None:
    case.true("ran", True)
"""


@pytest.fixture
def suite(toy: Toy) -> Toy:
    for number in (1, 2, 3):
        toy.contract(f"AMP-API-{number:03}")
    toy.checks(_CHECKS)
    return toy


def test_alone_the_run_ends_incomplete_with_the_case_named(suite: Toy) -> None:
    outcome = suite.spawn("", "--case-timeout", "2", "-n", "0", "-p", "no:randomly")
    footer = outcome.report["footer"]

    assert outcome.status == footer["exit_status"] == 2, outcome.output
    assert footer["overall"] == "INCOMPLETE"
    assert outcome.verdicts() == {"AMP-API-001[before]": "PASS", "AMP-API-002[hangs]": "ERROR"}
    hung = outcome.report["cases"][1]
    assert hung["reason"].startswith("it did not end within 2 s and was ended")
    assert "in waits_for_ever" in hung["detail"]
    assert "in waits_for_ever" in outcome.output
    assert "AMP-API-002[hangs] hangs" in outcome.output
    assert "INCOMPLETE on cpu" in outcome.output


def test_among_workers_the_worker_is_replaced_and_the_run_goes_on(suite: Toy) -> None:
    outcome = suite.spawn("", "--case-timeout", "2", "-n", "2", "-p", "no:randomly")
    verdicts = outcome.verdicts()

    assert outcome.status == 3, outcome.output
    assert verdicts.pop("AMP-API-002[hangs]") == "ERROR"
    assert (len(verdicts), set(verdicts.values())) == (21, {"PASS"})
    hung = next(case for case in outcome.report["cases"] if case["id"] == "AMP-API-002[hangs]")
    assert "in waits_for_ever" in hung["detail"]
    assert outcome.report["footer"]["problems"] == []
    assert "it did not end within 2 s and was ended" in " ".join(outcome.output.split())


def test_a_generous_limit_ends_nothing(suite: Toy) -> None:
    assert suite.spawn("", "--case-timeout", "600", "-k", "not hangs").status == 0
    assert suite.spawn("", "--case-timeout", "0", "-k", "not hangs").status == 0


@pytest.mark.parametrize("given", ["-1", "soon", "nan", "inf", "1e9"])
def test_other_limits_are_refused(toy: Toy, given: str) -> None:
    toy.contract("AMP-API-001")

    outcome = toy.run(f"--case-timeout={given}")

    assert outcome.status == 4
    assert f"--case-timeout: '{given}' is not a number of seconds" in outcome.output


def test_limits_are_generous() -> None:
    assert SECONDS["quick"] >= 300
    assert SECONDS["quick"] < SECONDS["standard"] < SECONDS["full"]


def test_it_works_without_the_faulthandler_plugin_of_pytest(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_it(case: Case) -> None:\n    case.equal('one', 1, 1)\n")

    assert toy.run("-p", "no:faulthandler").verdicts() == {"AMP-API-001[it]": "PASS"}
