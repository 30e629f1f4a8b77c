"""--baseline fails the run where what passed before does not pass now, or is gone."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tests import reports
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
    clean: dict[str, list[str]] = {"regressed": [], "gone": [], "known": [], "accepted": []}
    assert outcome.report["footer"]["baseline"] == {"path": "report.json", **clean}


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


_HOLDS = ("AMP-API-002", "b", "case.equal('y', 1, 1)")
_LINE = """
[[change]]
contract = "{contract}"
from = "PASS"
to = "{to}"
reason = "Changed on purpose."
owner = "Somebody"
link = "https://example.org/1"
expires = {expires}
"""


def _accept(suite: Toy, contract: str = "AMP-API-001", to: str = "UNSUPPORTED", expires: str = "2999-12-31") -> None:
    (suite.path / "accepted.toml").write_text(_LINE.format(contract=contract, to=to, expires=expires))


def test_waived_failure_is_known_and_no_regression(suite: Toy) -> None:
    suite.checks(_checks(("AMP-API-001", "a", "case.equal('x', 1, 2)"), _HOLDS))
    (suite.path / "waivers.toml").write_text(
        '[[waiver]]\ncontract = "AMP-API-001"\ncases = ["*"]\nreason = "Broken upstream."\nowner = "Somebody"\n'
        'link = "https://example.org/1"\nexpires = 2999-12-31\n'
    )

    outcome = suite.run("--baseline", "old/report.json", "--waivers", "waivers.toml")

    assert outcome.status == 0
    found = outcome.report["footer"]["baseline"]
    assert (found["regressed"], found["gone"]) == ([], [])
    excuse = "waived: Broken upstream. (Somebody, until 2999-12-31)"
    assert found["known"] == [
        {"id": id, "after": "WAIVED", "excuse": excuse} for id in ("AMP-API-001", "AMP-API-001[a]")
    ]
    assert excuse in " ".join(outcome.output.split())


def test_accepted_change_is_known_and_no_regression(suite: Toy) -> None:
    suite.checks(_checks(("AMP-API-001", "a", "case.unsupported('gone')"), _HOLDS))
    _accept(suite)

    outcome = suite.run("--baseline", "old/report.json", "--accepted-changes", "accepted.toml")

    assert outcome.status == 0
    (line,) = outcome.report["footer"]["baseline"]["accepted"]
    assert (line["state"], line["matched"], line["after"]) == ("used", 1, "UNSUPPORTED")
    assert "accepted: Changed on purpose. (Somebody, until 2999-12-31)" in " ".join(outcome.output.split())


@pytest.mark.parametrize(
    ("expires", "said"), [("2999-12-31", "is not needed"), ("2020-01-01", "expired on 2020-01-01")]
)
def test_accepted_change_that_rots_fails_the_run(suite: Toy, expires: str, said: str) -> None:
    suite.checks(_checks(("AMP-API-001", "a", "case.equal('x', 1, 1)"), _HOLDS))
    _accept(suite, expires=expires)

    outcome = suite.run("--baseline", "old/report.json", "--accepted-changes", "accepted.toml")

    assert outcome.status == 1
    (problem,) = outcome.report["footer"]["problems"]
    assert problem.startswith("the accepted change of AMP-API-001 (PASS -> UNSUPPORTED) ")
    assert said in problem


def test_accepted_changes_without_a_baseline_are_refused(suite: Toy) -> None:
    _accept(suite)

    outcome = suite.run("--accepted-changes", "accepted.toml", report="new")

    assert outcome.status == 4
    assert "add --baseline" in outcome.output


def test_baseline_of_a_run_that_did_not_end_is_refused(suite: Toy) -> None:
    path = suite.path / "old" / "report.json"
    whole = reports.written(path)
    path.write_text(json.dumps({**whole, "footer": None}))

    outcome = suite.run("--baseline", "old", report="new")

    assert outcome.status == 4
    assert "--baseline: old is INCOMPLETE, of a run that did not end" in outcome.output


@pytest.mark.parametrize(
    ("checks", "missing", "said"),
    [
        (("AMP-API-001", "a", "case.unsupported('gone')"), "AMP-API-001[a]", "does not pass here"),
        (("AMP-API-001", "renamed", "case.equal('x', 1, 1)"), "AMP-API-001[a]", "is not judged here"),
    ],
)
def test_regression_is_a_failure_in_the_junit_file(
    suite: Toy, checks: tuple[str, str, str], missing: str, said: str
) -> None:
    suite.checks(_checks(checks, _HOLDS))

    outcome = suite.run("--baseline", "old/report.json", "--junitxml", "junit.xml")

    assert outcome.status == 1
    (tests,) = ElementTree.parse(suite.path / "junit.xml").getroot().iter("testsuite")
    named = outcome.report["footer"]["baseline"]["regressed"] + outcome.report["footer"]["baseline"]["gone"]
    failed = {case.get("name"): row.get("message") for case in tests for row in case.iter("failure")}
    assert int(tests.get("failures", "0")) == len(named) == len(failed)
    assert failed[f"baseline {missing}"] == f"{missing} passed in the baseline and {said}"


def test_clean_run_adds_nothing_to_the_junit_file(suite: Toy) -> None:
    suite.checks(_checks(("AMP-API-001", "a", "case.equal('x', 1, 1)"), _HOLDS))

    outcome = suite.run("--baseline", "old/report.json", "--junitxml", "junit.xml")

    assert outcome.status == 0
    (tests,) = ElementTree.parse(suite.path / "junit.xml").getroot().iter("testsuite")
    assert (tests.get("tests"), tests.get("failures"), tests.get("errors")) == ("2", "0", "0")


def test_stored_baseline_of_a_version_that_is_not_there_is_refused(suite: Toy) -> None:
    outcome = suite.run("--baseline", "torch-1.13.1", report="new")

    assert outcome.status == 4
    assert "--baseline: there is no stock baseline of torch 1.13; there are torch-2.6.0, " in outcome.output
