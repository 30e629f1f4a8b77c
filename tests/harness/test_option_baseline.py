"""--baseline fails the run where what passed before does not pass now, or is gone."""

from __future__ import annotations

import pytest

from tests.conftest import Toy

_CHECK = "@contract('{id}')\ndef test_{name}(case: Case) -> None:\n    {body}\n"


def _checks(*rows: tuple[str, str, str]) -> str:
    return "".join(_CHECK.format(id=id, name=name, body=body) for id, name, body in rows)


@pytest.fixture
def suite(toy: Toy) -> Toy:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(_checks(("AMP-API-001", "a", "case.equal('x', 1, 1)"), ("AMP-API-002", "b", "case.equal('y', 1, 2)")))
    toy.run(report="old")
    return toy


def test_unchanged_run_has_no_regression(suite: Toy) -> None:
    suite.checks(_checks(("AMP-API-001", "a", "case.equal('x', 1, 1)"), ("AMP-API-002", "b", "case.equal('y', 1, 1)")))

    outcome = suite.run("--baseline", "old/report.json")

    assert outcome.status == 0
    assert outcome.report["footer"]["baseline"] == {"path": "report.json", "regressed": [], "gone": []}


def test_case_that_no_longer_passes_fails_the_run_even_where_it_is_no_failure(suite: Toy) -> None:
    suite.checks(
        _checks(("AMP-API-001", "a", "case.unsupported('gone')"), ("AMP-API-002", "b", "case.equal('y', 1, 1)"))
    )

    outcome = suite.run("--baseline", "old/report.json")

    assert outcome.status == 1
    assert "AMP-API-001[a]" in outcome.report["footer"]["baseline"]["regressed"]
    assert "AMP-API-001" in outcome.output


def test_case_that_has_vanished_fails_the_run(suite: Toy) -> None:
    suite.checks(
        _checks(("AMP-API-001", "renamed", "case.equal('x', 1, 1)"), ("AMP-API-002", "b", "case.equal('y', 1, 1)"))
    )

    outcome = suite.run("--baseline", "old/report.json")

    assert outcome.status == 1
    assert "AMP-API-001[a]" in outcome.report["footer"]["baseline"]["gone"]


@pytest.mark.parametrize("text", [None, "{", '{"schema": "something-else"}'])
def test_bad_baseline_is_refused(suite: Toy, text: str | None) -> None:
    if text is not None:
        (suite.path / "bad.json").write_text(text)

    outcome = suite.run("--baseline", "bad.json", report="new")

    assert outcome.status == 4
    assert "bad.json" in outcome.output
    assert "Traceback" not in outcome.output
    assert not (suite.path / "new").exists()


def test_baseline_that_the_run_would_overwrite_is_refused(suite: Toy) -> None:
    outcome = suite.run("--baseline", "old/report.json", report="old")

    assert outcome.status == 4
    assert "is the report that this run writes" in outcome.output
    assert outcome.verdicts() == {"AMP-API-001[a]": "PASS", "AMP-API-002[b]": "FAIL"}


def test_run_of_one_chapter_is_held_against_that_chapter_alone(suite: Toy) -> None:
    suite.contract("AMP-SCALE-001")
    suite.checks(
        _checks(("AMP-API-001", "a", "case.equal('x', 1, 1)"), ("AMP-SCALE-001", "c", "case.equal('y', 1, 1)")),
    )
    suite.run(report="both")

    outcome = suite.run("--chapter", "scale", "--baseline", "both/report.json")

    assert outcome.status == 0
    assert outcome.report["footer"]["baseline"]["gone"] == []
