"""How a check ends decides the verdict, what pytest shows, and the exit status."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Toy

_BODIES = {
    "PASS": "case.equal('one', 1, 1)",
    "FAIL": "case.equal('one', 1, 2)",
    "UNSUPPORTED": "case.unsupported('no such unit')",
    "UNTESTABLE": "case.untestable('a second device is missing')",
    "INCONCLUSIVE": "case.inconclusive('too noisy')",
    "ERROR": "undefined_name",
}


def _one(toy: Toy, body: str, **contract: str) -> None:
    toy.contract("AMP-API-001", **contract)
    toy.checks(f"@contract('AMP-API-001')\ndef test_it(case: Case) -> None:\n    {body}\n")


@pytest.mark.parametrize(
    ("verdict", "status", "overall", "shown"),
    [
        ("PASS", 0, "CONFORMANT", {"passed": 1}),
        ("FAIL", 1, "NOT CONFORMANT", {"failed": 1}),
        ("UNSUPPORTED", 5, "NOTHING RAN", {"skipped": 1}),
        ("UNTESTABLE", 5, "NOTHING RAN", {"skipped": 1}),
        ("INCONCLUSIVE", 0, "INCONCLUSIVE", {"skipped": 1}),
        ("ERROR", 3, "NOT CONFORMANT", {"errors": 1}),
    ],
)
def test_ending_gives_verdict(toy: Toy, verdict: str, status: int, overall: str, shown: dict[str, int]) -> None:
    _one(toy, _BODIES[verdict])

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[it]": verdict}
    assert outcome.report["footer"]["overall"] == overall
    assert outcome.status == status == outcome.report["footer"]["exit_status"]
    word = {"errors": "error"}.get(next(iter(shown)), next(iter(shown)))
    assert f"1 {word}" in outcome.output


@pytest.mark.parametrize("ending", ["unsupported", "untestable"])
def test_reason_is_one_line_that_can_be_read(toy: Toy, ending: str) -> None:
    """torch's dispatcher tells of each kernel of an op, on 60 lines."""
    _one(toy, f"case.{ending}('no such op: ' + 'far ' * 200 + '\\nCPU: registered at ...')")

    outcome = toy.run()

    (case,) = outcome.report["cases"]
    assert case["reason"].startswith("no such op: far far")
    assert case["reason"].endswith(" far ...")
    assert len(case["reason"]) <= 300


def test_name_that_torch_itself_lacks_is_a_failure(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken torch may use a variable before it sets it; only the suite's own such slip is an error."""
    source = "def broken():\n    return value\n    value = 1\n"
    namespace: dict[str, Any] = {"__name__": "torch.amp.grad_scaler"}
    exec(source, namespace)
    monkeypatch.setattr(torch.amp, "GradScaler", namespace["broken"])
    _one(toy, "case.equal('one', torch.amp.GradScaler(), 1)")

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[it]": "FAIL"}
    assert "UnboundLocalError" in outcome.output


@pytest.mark.parametrize(
    ("module", "verdict"),
    [("conformance.oracles.tables", "ERROR"), ("conformance.chapters.cast.test_it", "FAIL"), ("torch.optim", "FAIL")],
)
def test_look_up_that_fails_in_a_table_of_the_suite_is_an_error(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, module: str, verdict: str
) -> None:
    namespace: dict[str, Any] = {"__name__": module}
    exec("def broken():\n    return {}['missing']\n", namespace)
    monkeypatch.setattr(torch.amp, "GradScaler", namespace["broken"])
    _one(toy, "case.equal('one', torch.amp.GradScaler(), 1)")

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[it]": verdict}


def test_unsupported_beside_a_pass_is_conformant(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.unsupported('no bf16')\n"
        "@contract('AMP-API-002')\ndef test_b(case: Case) -> None:\n    case.equal('fact', 1, 1)\n"
    )

    outcome = toy.run()

    assert outcome.status == 0
    assert outcome.report["footer"]["overall"] == "CONFORMANT"
    assert "no bf16" in outcome.output


@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        ("torch.mm(torch.ones(2, 3), torch.ones(2, 3))", "FAIL", "raised RuntimeError"),
        ("assert 1 == 2", "FAIL", "AssertionError"),
        ("raise torch.OutOfMemoryError('no room')", "UNTESTABLE", "no room"),
        ("import missing_module", "ERROR", "ModuleNotFoundError"),
        ("pass", "ERROR", "no evidence"),
        ("pytest.skip('raw skip')", "UNTESTABLE", "raw skip"),
    ],
)
def test_exceptions_are_told_apart(toy: Toy, body: str, verdict: str, reason: str) -> None:
    _one(toy, body)

    case = toy.run().report["cases"][0]

    assert case["verdict"] == verdict
    assert reason in case["reason"]


def test_fixture_that_breaks_is_the_suites_error(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@pytest.fixture\ndef broken() -> None:\n    raise ValueError('set-up')\n"
        "@contract('AMP-API-001')\ndef test_it(case: Case, broken: None) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[it]": "ERROR"}
    assert outcome.status == 3


def test_a_failure_outranks_a_broken_suite_in_the_exit_status(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 2)\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    undefined_name\n"
    )

    outcome = toy.run()

    assert outcome.status == 1
    assert outcome.report["footer"]["contracts"]["AMP-API-001"]["verdict"] == "ERROR"


def test_module_that_cannot_be_imported_breaks_the_run_but_not_the_others(toy: Toy) -> None:
    _one(toy, _BODIES["PASS"])
    toy.checks("import missing_module\n", name="test_broken")

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[it]": "PASS"}
    assert outcome.status == 3
    assert outcome.report["footer"]["overall"] == "NOT CONFORMANT"
    assert "missing_module" in outcome.report["footer"]["problems"][0]


def test_info_contract_never_fails_the_run(toy: Toy) -> None:
    toy.contract("AMP-API-001", level="info", authority="engineering")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.inconclusive('noise')\n"
        "@contract('AMP-API-002')\ndef test_b(case: Case) -> None:\n    case.equal('fact', 1, 1)\n"
    )

    outcome = toy.run()

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT")
    assert outcome.verdicts() == {"AMP-API-001[a]": "UNTESTABLE", "AMP-API-002[b]": "PASS"}


def test_nothing_collected_is_a_failure(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("")

    outcome = toy.run()

    assert outcome.status == 5
    assert outcome.report["footer"]["overall"] == "NOTHING RAN"
    assert outcome.report["footer"]["contracts"]["AMP-API-001"]["verdict"] is None


def test_first_failure_stops_where_asked_and_is_not_a_pass(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 2)\n"
        "@contract('AMP-API-002')\ndef test_b(case: Case) -> None:\n    case.equal('fact', 1, 1)\n"
    )

    outcome = toy.run("-x")

    assert outcome.status == 1
    assert outcome.report["footer"]["contracts"]["AMP-API-002"]["verdict"] is None
    assert "stopped before" in outcome.report["footer"]["contracts"]["AMP-API-002"]["reason"]


@pytest.mark.parametrize(("cases_left", "status", "overall"), [(1, 2, "INCOMPLETE"), (0, 0, "CONFORMANT")])
def test_run_that_a_fact_stops_is_complete_only_where_nothing_is_left(
    toy: Toy, cases_left: int, status: int, overall: str
) -> None:
    toy.contract("AMP-API-001", level="info", authority="engineering")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-002')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    case.equal('fact', 1, 2)\n"
        + "@contract('AMP-API-002')\ndef test_c(case: Case) -> None:\n    case.equal('y', 1, 1)\n"
        * cases_left
    )

    outcome = toy.run("-x")

    assert (outcome.status, outcome.report["footer"]["overall"]) == (status, overall)


def test_error_of_an_info_contract_fails_the_run(toy: Toy) -> None:
    """Info facts are never judged, but a suite that broke has said nothing about them either."""
    _one(toy, "undefined_name", level="info", authority="engineering")

    outcome = toy.run()

    assert (outcome.status, outcome.report["footer"]["overall"]) == (3, "NOT CONFORMANT")


def test_two_cases_with_one_id_are_refused(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    check = "@contract('AMP-API-001')\ndef test_it(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
    toy.checks(check, name="test_one")
    toy.checks(check, name="test_two")

    outcome = toy.run()

    assert outcome.status == 4
    assert "two cases have the id AMP-API-001[it]" in outcome.output


def test_junit_file_says_what_was_promised_and_seen(toy: Toy) -> None:
    _one(toy, _BODIES["FAIL"])

    toy.run("--junitxml", "junit.xml")

    written = (toy.path / "junit.xml").read_text()
    assert "AMP-API-001: one: 1, NOT == 2" in written
    assert "The next step for AMP-API-001." in written
    assert 'name="verdict" value="FAIL"' in written
