"""The case that shows a fault goes first, and a file that is out of date hides nothing."""

from __future__ import annotations

from pathlib import Path

from tests.faults import load
from tests.faults.campaigns import first_failures
from tests.faults.campaigns.campaign import run

FAULT = load()["first_momentum_is_halved_but_for_one"]


def test_the_file_names_faults_that_exist() -> None:
    assert set(first_failures.known()) - set(load()) == set()


def test_the_case_runs_before_the_others() -> None:
    case = first_failures.found(FAULT, seconds=0.0)
    assert case is not None

    outcome = run(FAULT, until_caught=True, first=case)

    assert [(one["id"], one["verdict"]) for one in outcome.cases] == [(case, "FAIL")]


def test_a_fault_whose_case_is_no_more_is_caught() -> None:
    outcome = run(FAULT, until_caught=True, first="AMP-OPTIMIZER-107[absent_gradients:device-nothing]")

    assert outcome.caught
    assert len(outcome.cases) > 1


def test_a_case_that_fails_at_once_is_not_kept() -> None:
    assert first_failures.found(FAULT, seconds=1e6) is None


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cases.csv"
    first_failures.write({"b": "AMP-CLIP-001[one:device-a,b]", "a": "AMP-CLIP-002[two]"}, file)

    assert dict(first_failures.known(file)) == {"a": "AMP-CLIP-002[two]", "b": "AMP-CLIP-001[one:device-a,b]"}
