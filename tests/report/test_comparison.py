"""The rule of `diff` and --baseline: what is excused, what is not applicable, and what is not compared."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from conformance.report import comparison, diff, document
from conformance.report.comparison import Kind
from conformance.report.values import AcceptedChange, Report
from conformance.report.verdicts import Verdict
from tests import reports

TODAY = datetime.date(2026, 11, 22)
LINEAR = "AMP-SCALE-002[halving:device-inf]"


def _changed(*changes: tuple[str, Any], name: str = "conformant") -> Report:
    whole = reports.raw(name)
    for where, value in changes:
        reports.put(whole, where, value)
    return document.parse(whole)


def _place(id: str) -> int:
    return next(place for place, case in enumerate(reports.raw("conformant")["cases"]) if case["id"] == id)


def _without(*ids: str, **put: Any) -> Report:
    """Return the sample without these cases, and with other values at paths (`__` for a slash)."""
    whole = reports.raw("conformant")
    whole["cases"] = [case for case in whole["cases"] if case["id"] not in ids]
    for where, value in put.items():
        reports.put(whole, where.replace("__", "/"), value)
    return document.parse(whole)


def _broken(id: str = LINEAR, verdict: str = "FAIL", **more: Any) -> Report:
    place = _place(id)
    return _changed(
        (f"cases/{place}/verdict", verdict), *((f"cases/{place}/{key}", value) for key, value in more.items())
    )


def _line(**more: Any) -> AcceptedChange:
    given: dict[str, Any] = {
        "contract": "AMP-SCALE-002",
        "op": None,
        "cases": ("*",),
        "before": Verdict.PASS,
        "after": Verdict.FAIL,
        "reason": "Changed on purpose.",
        "owner": "Somebody",
        "link": "https://example.org/1",
        "expires": "2026-12-31",
    }
    return AcceptedChange(**{**given, **more})


def _compare(new: Report, *lines: AcceptedChange, old: Report | None = None) -> comparison.Comparison:
    return comparison.compare(old or reports.sample("conformant"), new, lines, today=TODAY)


def _kinds(found: comparison.Comparison) -> dict[str, Kind]:
    return {change.id: change.kind for change in found.changes}


def test_waiver_in_force_excuses_a_case_and_its_contract() -> None:
    found = _compare(_broken(verdict="WAIVED", waiver="Broken upstream.", reason="not so"))

    assert _kinds(found) == {"AMP-SCALE-002": Kind.KNOWN, LINEAR: Kind.KNOWN}
    assert not found.worse
    assert [change.why for change in found.known] == ["waived: Broken upstream. (by an unknown owner)"] * 2


def test_new_case_that_is_waived_excuses_its_contract_and_one_that_fails_does_not() -> None:
    old = _without(LINEAR)

    waived = _compare(_broken(verdict="WAIVED", waiver="Broken upstream.", reason="not so"), old=old)
    failing = _compare(_broken(), old=old)

    assert _kinds(waived) == {"AMP-SCALE-002": Kind.KNOWN, LINEAR: Kind.NEW}
    assert not waived.worse
    assert failing.regressed == ("AMP-SCALE-002",)


@pytest.mark.parametrize(
    ("line", "known"),
    [
        (_line(), True),
        (_line(cases=("*-inf]",)), True),
        (_line(cases=("*-nan]",)), False),
        (_line(contract="AMP-LOSS-001"), False),
        (_line(after=Verdict.ERROR), False),
        (_line(before=Verdict.WAIVED), False),
        (_line(expires="2026-11-21"), False),
        (_line(expires="2026-11-22"), True),
    ],
)
def test_accepted_change_excuses_what_it_names_until_it_expires(line: AcceptedChange, known: bool) -> None:
    found = _compare(_broken(), line)

    assert found.worse is not known
    assert found.regressed == (() if known else ("AMP-SCALE-002", LINEAR))
    assert {change.why for change in found.known} == (
        {"accepted: Changed on purpose. (Somebody, until " + line.expires + ")"} if known else set()
    )


def test_accepted_change_of_an_op_excuses_it_in_every_contract() -> None:
    place = _place(LINEAR)
    parameters = (f"cases/{place}/parameters", {"overload": "sum.dim_IntList"})
    new = _changed(parameters, (f"cases/{place}/verdict", "FAIL"))

    for op, known in (("sum", True), ("sum.dim_IntList", True), ("dim_IntList", False), ("su", False)):
        found = _compare(new, _line(contract=None, op=op))

        assert found.worse is not known
        assert found.accepted[0].state == ("used" if known else "unused")


def test_accepted_change_to_gone() -> None:
    found = _compare(_without(LINEAR), _line(after=None))

    assert _kinds(found) == {LINEAR: Kind.KNOWN}
    assert not found.worse


@pytest.mark.parametrize(
    ("line", "state", "stale"),
    [
        (_line(), "unused", ("the accepted change of AMP-SCALE-002 (PASS -> FAIL) is not needed: nothing changed so",)),
        (
            _line(after=None, expires="2026-01-01"),
            "expired",
            ("the accepted change of AMP-SCALE-002 (PASS -> GONE) expired on 2026-01-01",),
        ),
    ],
)
def test_line_that_excuses_nothing_fails_the_comparison(line: AcceptedChange, state: str, stale: tuple[str]) -> None:
    found = _compare(reports.sample("conformant"), line)

    assert [one.state for one in found.accepted] == [state]
    assert found.stale == stale
    assert found.worse
    shown = diff.render(reports.sample("conformant"), reports.sample("conformant"), found, names=("a", "b"))
    assert f"STALE  {stale[0]}" in shown
    assert shown.splitlines()[-1].startswith("REGRESSION: accepted changes that are stale: 1")


def test_line_about_what_the_run_was_not_asked_for_is_idle() -> None:
    new = _without(*(case["id"] for case in reports.raw("conformant")["cases"] if "SCALE" not in case["id"]))
    narrowed = _narrowed(new, chapters=("scale",))

    found = _compare(narrowed, _line(contract="AMP-LOSS-001"), _line())

    assert [one.state for one in found.accepted] == ["idle", "unused"]


def _narrowed(report: Report, **options: Any) -> Report:
    kept = tuple(row for row in report.header.contracts if row.chapter in options.get("chapters", (row.chapter,)))
    changed = dataclasses.replace(report.header.options, **options)
    return dataclasses.replace(report, header=dataclasses.replace(report.header, options=changed, contracts=kept))


def test_contract_of_other_versions_of_torch_is_not_gone() -> None:
    whole = reports.raw("conformant")
    whole["header"]["contracts"] = [row for row in whole["header"]["contracts"] if row["id"] != "AMP-SCALE-002"]
    whole["cases"] = [case for case in whole["cases"] if case["contract"] != "AMP-SCALE-002"]
    without = _compare(document.parse(whole))
    whole["header"]["not_in_force"] = {"AMP-SCALE-002": "in force until torch 2.11"}

    found = _compare(document.parse(whole))

    assert "AMP-SCALE-002" in without.gone
    assert not found.worse
    assert set(_kinds(found).values()) == {Kind.NOT_APPLICABLE}
    assert {change.why for change in found.changes} == {
        "not applicable to torch 2.11: the contract is in force until torch 2.11"
    }


def test_op_without_a_rule_in_this_version_is_not_gone() -> None:
    place = _place(LINEAR)
    old = _changed((f"cases/{place}/parameters", {"op": "qr"}))
    moved = {"qr": "autocasts until torch 2.14"}

    assert _compare(_without(LINEAR), old=old).gone == (LINEAR,)
    found = _compare(_without(LINEAR, header__op_policy__cpu__not_in_force=moved), old=old)
    elsewhere = _compare(_without(LINEAR, header__op_policy__cuda__not_in_force=moved), old=old)

    assert not found.worse
    assert [change.why for change in found.changes] == ["not applicable to torch 2.11: qr autocasts until torch 2.14"]
    assert elsewhere.gone == (LINEAR,)


def test_what_the_machine_cannot_have_is_not_gone() -> None:
    found = _compare(_without(LINEAR, footer__not_applicable={LINEAR: "one cuda device only"}))

    assert not found.worse
    assert [(one.kind, one.why) for one in found.changes] == [
        (Kind.NOT_APPLICABLE, "not applicable to this machine: one cuda device only")
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"level": "quick"}, "left out by --level quick"),
        ({"selection": "-k 'not inf'"}, "left out by -k 'not inf'"),
        ({"level": "full"}, None),
        ({}, None),
    ],
)
def test_what_the_run_was_not_asked_for_is_not_gone(options: dict[str, str], why: str | None) -> None:
    found = _compare(_narrowed(_without(LINEAR), **options))

    assert found.worse is (why is None)
    assert [(one.kind, one.why) for one in found.changes] == [
        (Kind.GONE if why is None else Kind.NOT_COMPARED, why or "")
    ]


def test_dtype_that_the_run_leaves_out_is_not_gone() -> None:
    id = next(
        case["id"] for case in reports.raw("conformant")["cases"] if case["parameters"].get("amp_dtype") == "bf16"
    )

    found = _compare(_narrowed(_without(id), amp_dtype="fp16"))

    assert [one.why for one in found.changes if one.case] == ["left out by --amp-dtype fp16"]


def test_fake_target_that_this_torch_lacks_is_not_gone() -> None:
    ids = [case["id"] for case in reports.raw("conformant")["cases"] if case["target"] == "fake:cuda"]
    targets = reports.raw("conformant")["header"]["targets"][:1]

    found = _compare(_without(*ids, header__targets=targets))

    assert ids
    assert not found.worse
    assert {one.why for one in found.changes if one.case} == {
        "not applicable to torch 2.11: it has no autocast for cuda"
    }


def test_times_of_another_class_of_machine_are_not_compared() -> None:
    speed = next(case["id"] for case in reports.raw("conformant")["cases"] if "SPEED" in case["id"])
    new = _broken(speed)
    slower = document.parse(
        {**_raw(new_verdict=(speed, "FAIL")), "header": {**reports.raw("conformant")["header"], "flags": {}}}
    )

    assert _kinds(_compare(new))[speed] is Kind.REGRESSED
    found = _compare(slower)

    assert _kinds(found)[speed] is Kind.NOT_COMPARED
    assert [one.why for one in found.changes if one.case] == [
        "measured on another class of machine (16 threads -> none threads)"
    ]


def _raw(new_verdict: tuple[str, str]) -> dict[str, Any]:
    whole = reports.raw("conformant")
    whole["cases"][_place(new_verdict[0])]["verdict"] = new_verdict[1]
    return whole


def test_texts_of_excuses_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2J\x07\nREGRESSION"
    new = _broken(verdict="WAIVED", waiver=hostile, reason="not so")
    gone = _without(LINEAR, footer__not_applicable={LINEAR: hostile})
    accepted = _broken()
    for report, lines in ((new, ()), (gone, ()), (accepted, (_line(reason=hostile, owner=hostile),))):
        found = _compare(report, *lines)
        shown = diff.render(reports.sample("conformant"), report, found, names=("a", "b"))

        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\nREGRESSION" not in shown


def test_tensors_are_summarised() -> None:
    place = _place(LINEAR)
    evidence = {
        "name": "gradient",
        "measured": [[0.5] * 8, ["nan", -2.0, *[1.0] * 6]],
        "relation": "==",
        "bound": [[1.0] * 8, [1.0] * 8],
        "unit": "",
        "holds": False,
    }
    new = _changed((f"cases/{place}/verdict", "FAIL"), (f"cases/{place}/evidence", [evidence] * 4))

    shown = " ".join(diff.render(reports.sample("conformant"), new, _compare(new), names=("a", "b")).split())

    assert "gradient: 16 numbers from -2 to 1, 1 nan (required: == 16 numbers from 1 to 1)" in shown
    assert "and 2 more" in shown
