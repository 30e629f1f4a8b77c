"""The self-check in a report: what it comes to, how it reads, and which claims about it are contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.report import checklist, consistency, document, rollup, terminal
from conformance.report.verdicts import Overall
from tests import reports

_CONTRACT = next(iter(reports.sample("conformant").contracts))
_CAUGHT = {
    "name": "product_is_wrong",
    "summary": "A product is wrong.",
    "target": reports.sample("conformant").header.targets[0].name,
    "contracts": [_CONTRACT],
    "state": "caught",
    "case": f"{_CONTRACT}[one]",
    "reason": "",
}
_MISSED = {**_CAUGHT, "name": "sum_is_wrong", "state": "missed", "case": None, "reason": "2 of 2 cases pass"}
_NOT_PLANTED = {**_MISSED, "name": "cache_is_wrong", "state": "not planted", "reason": "this torch has no cache"}


def _with(*faults: dict[str, Any]) -> document.Report:
    whole = reports.changed("conformant", "footer/self_check", {"faults": list(faults), "duration_s": 2.0})
    return document.parse(whole)


@pytest.mark.parametrize(
    ("faults", "overall", "said"),
    [
        ((_CAUGHT,), Overall.CONFORMANT, "self-check: caught 1 of 1 planted fault (2.0 s)"),
        ((_CAUGHT, _NOT_PLANTED), Overall.CONFORMANT, "self-check: caught 1 of 1 planted fault (2.0 s)"),
        ((_CAUGHT, _MISSED), Overall.INCONCLUSIVE, "self-check: caught 1 of 2 planted faults (2.0 s)"),
        ((), Overall.CONFORMANT, "self-check: no planted fault concerns the selection (2.0 s)"),
        ((_NOT_PLANTED,), Overall.CONFORMANT, "self-check: none of 1 fault can be planted here (2.0 s)"),
    ],
    ids=["caught", "not planted", "missed", "nothing", "nothing planted"],
)
def test_what_the_self_check_comes_to(faults: tuple[dict[str, Any], ...], overall: Overall, said: str) -> None:
    report = _with(*faults)
    shown = terminal.render(report, short=False, width=100, report_path="report.json")

    assert rollup.overall(report) is overall
    assert said in shown
    assert said.lower() in checklist.render(report, with_annex=True).lower()
    assert ("1 of 2 planted faults NOT CAUGHT, so this is no pass" in shown) is (overall is Overall.INCONCLUSIVE)
    assert list(consistency.contradictions(report)) == [] or overall is Overall.INCONCLUSIVE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "cuda:7"}, "was on no target of the run"),
        ({"case": None}, "noticed by nothing"),
        ({"reason": "2 of 2 cases pass"}, "with a reason why not"),
        ({"state": "missed"}, "is said to be missed, noticed by"),
        ({"case": "AMP-API-999[one]"}, "which is no case of a contract that has to"),
    ],
)
def test_contradictions(change: dict[str, Any], said: str) -> None:
    found = list(consistency.contradictions(_with({**_CAUGHT, **change})))

    assert any(said in one for one in found), found


def test_short_summary_names_what_was_missed() -> None:
    shown = terminal.render(_with(_MISSED), short=True, width=100, report_path="report.json")

    assert f"NOT CAUGHT  sum_is_wrong ({_CONTRACT})" in shown
