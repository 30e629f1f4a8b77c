"""The comparison of two reports: what changed around the run, what regressed, and which of it counts."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.report import comparison, diff, document
from conformance.report.comparison import Kind
from conformance.report.values import Report
from tests import reports


def _of(verdicts: dict[str, str], **levels: str) -> Report:
    """Return a report with one case of each contract; `levels` are those of the contracts, `must` by default."""
    whole = reports.raw("improved")
    row, case = whole["header"]["contracts"][0], whole["cases"][0]
    whole["header"]["contracts"] = [{**row, "id": id, "level": levels.get(id, "must")} for id in verdicts]
    whole["cases"] = [
        {**case, "id": f"{id}[x]", "contract": id, "verdict": verdict}
        for id, verdict in verdicts.items()
        if verdict != "not reached"
    ]
    return document.parse(whole)


@pytest.mark.parametrize(
    ("old", "new", "kind", "counts"),
    [
        ("PASS", "PASS", None, False),
        ("FAIL", "FAIL", None, False),
        ("PASS", "FAIL", Kind.REGRESSED, True),
        ("PASS", "ERROR", Kind.REGRESSED, True),
        ("PASS", "WAIVED", Kind.REGRESSED, True),  # with no waiver that says so
        ("PASS", "UNSUPPORTED", Kind.REGRESSED, True),
        ("PASS", "UNTESTABLE", Kind.REGRESSED, True),
        ("PASS", "INCONCLUSIVE", Kind.UNDECIDED, False),
        ("PASS", "not reached", Kind.GONE, True),
        ("FAIL", "not reached", Kind.GONE, False),
        ("FAIL", "PASS", Kind.FIXED, False),
        ("WAIVED", "PASS", Kind.FIXED, False),
        ("ERROR", "PASS", Kind.FIXED, False),
        ("UNSUPPORTED", "PASS", Kind.CHANGED, False),
        ("FAIL", "WAIVED", Kind.CHANGED, False),
        ("UNSUPPORTED", "FAIL", Kind.CHANGED, False),
        ("not reached", "PASS", Kind.NEW, False),
        ("not reached", "FAIL", Kind.NEW, False),
    ],
)
def test_kind_of_a_change_and_whether_it_counts(old: str, new: str, kind: Kind | None, counts: bool) -> None:
    there, here = _of({"A": old, "B": "PASS"}), _of({"A": new, "B": "PASS"})

    found = comparison.compare(there, here)

    assert [(change.id, change.kind) for change in found.changes] == ([("A", kind), ("A[x]", kind)] if kind else [])
    assert found.worse is counts


def test_contract_that_vanished_is_gone() -> None:
    found = comparison.compare(_of({"A": "PASS", "B": "PASS"}), _of({"B": "PASS"}))

    assert (found.regressed, found.gone) == ((), ("A", "A[x]"))


def test_contract_for_information_never_counts() -> None:
    there = _of({"A": "PASS", "B": "PASS"}, A="info")

    assert not comparison.compare(there, _of({"A": "FAIL", "B": "PASS"}, A="info")).worse
    assert not comparison.compare(there, _of({"B": "PASS"})).worse


def test_regression_cannot_hide_behind_a_level_lowered_since() -> None:
    there = _of({"A": "PASS"})

    assert comparison.compare(there, _of({"A": "FAIL"}, A="info")).regressed == ("A", "A[x]")
    assert not comparison.compare(there, _of({"A": "PASS"}, A="info")).worse


def test_regression_of_one_case_counts_where_the_contract_had_failed_before() -> None:
    old, new = reports.raw("failing"), reports.raw("failing")
    passing = next(case for case in new["cases"] if case["id"] == "AMP-SCALE-002[halving:device-nan]")
    passing["verdict"] = "FAIL"

    found = comparison.compare(document.parse(old), document.parse(new))

    assert (found.regressed, found.gone) == (("AMP-SCALE-002[halving:device-nan]",), ())


def test_environment_difference_names_torch_and_hardware_first() -> None:
    names = [fact.name for fact in diff.around(reports.sample("conformant"), reports.sample("untestable"))]

    assert names[:4] == ["torch", "cuda build", "driver", "target device"]
    assert names.index("option gpu") > names.index("target device: capability")
    assert "target fake-cuda" in names


@pytest.mark.parametrize(
    ("where", "value", "fact"),
    [
        ("header/environment/driver", "580.1", diff.Around("driver", "none", "580.1")),
        (
            "header/flags/torch.backends.cuda.matmul.allow_tf32",
            True,
            diff.Around("torch.backends.cuda.matmul.allow_tf32", "false", "true"),
        ),
        ("header/flags/torch.new_flag", 1, diff.Around("torch.new_flag", "absent", "1")),
        ("header/variables/OMP_NUM_THREADS", "1", diff.Around("variable OMP_NUM_THREADS", "16", "1")),
        ("header/options/level", "quick", diff.Around("option level", "standard", "quick")),
        ("header/options/seed", 7, diff.Around("option seed", "0", "7")),
        ("header/environment/packages/pytest", "9.0", diff.Around("package pytest", "8.4.2", "9.0")),
        ("header/suite/commit", None, diff.Around("suite commit", "3f9d2c41b8e07a56d1c2e9f04b7a8d6c5e1f2a30", "none")),
        (
            "header/targets/0/probe/amp_dtypes",
            ["bf16"],
            diff.Around("target device: amp_dtypes", "[fp16, bf16]", "[bf16]"),
        ),
    ],
)
def test_every_difference_around_the_run_is_found(where: str, value: Any, fact: diff.Around) -> None:
    new = document.parse(reports.changed("conformant", where, value))

    assert diff.around(reports.sample("conformant"), new) == [fact]


def _with_backends(**entries: dict[str, Any]) -> Report:
    return document.parse(reports.changed("conformant", "header/torch_backends", entries))


def test_change_of_an_entry_of_torch_backends_is_found() -> None:
    old = _with_backends(mkl={"is_available": True}, nnpack={"is_available": False}, opt_einsum={})
    new = _with_backends(
        mkl={"is_available": False},
        nnpack={"is_available": False},
        opt_einsum={"enabled": True},
        kleidiai={"version": 3},
    )

    assert diff.around(old, new) == [
        diff.Around("torch.backends.mkl.is_available", "true", "false"),
        diff.Around("torch.backends.kleidiai.version", "absent", "3"),
    ]
    assert diff.around(reports.sample("conformant"), new) == []  # an older suite recorded none


def test_time_of_the_run_is_no_difference() -> None:
    new = document.parse(reports.changed("conformant", "header/started", "2026-12-01T00:00:00+00:00"))

    assert diff.around(reports.sample("conformant"), new) == []


def _render(old: Report, new: Report) -> str:
    return diff.render(old, new, comparison.compare(old, new), names=("old.json", "new.json"), width=100)


def test_sections_stand_in_their_order() -> None:
    shown = _render(reports.sample("conformant"), reports.sample("improved"))
    titles = [
        "old: old.json, CONFORMANT, torch 2.11.0+cpu",
        "new: new.json, CONFORMANT, torch 2.15.0+cpu",
        "Op policy: what moved",
        "rms_norm now autocasts to float32 on cuda",
        "Environment: what differs",
        "torch: 2.11.0+cpu -> 2.15.0+cpu",
        "Fixed: did not hold there, passes here (1 contract and 1 case)",
        "AMP-MEMORY-001[linear:device]: WAIVED -> PASS",
        "Gone: judged there, not judged here (1 case)",
        "AMP-SCALE-002[halving:device-nan]: PASS -> not judged",
        "New: judged here only (1 case)",
        "AMP-LOSS-001  cross_entropy of 16-bit logits is float32 in value\n    1 case PASS",
        "REGRESSION: passed there, gone here: 1 case; fixed: 1 contract and 1 case; new: 1 case. Op policy moved: 1",
    ]

    assert [shown.index(title) for title in titles] == sorted(shown.index(title) for title in titles)


def test_regression_is_shown_with_what_was_seen() -> None:
    shown = _render(reports.sample("conformant"), reports.sample("failing"))

    assert "Regressed: passed there, does not pass here (3 contracts and 4 cases)" in shown
    assert "Undecided: passed there, and here the measurement was too noisy to decide (1 contract and 1 case)" in shown
    assert "AMP-SCALE-002  The loss scale is halved after a step with an inf" in shown
    assert "AMP-SCALE-002[halving:device-inf]: PASS -> FAIL, new scale: 65536 (required: exactly 32768)" in shown
    assert "Changed otherwise (1 contract and 1 case)" in shown
    assert shown.splitlines()[-1].startswith("REGRESSION: passed there, not here: 3 contracts and 4 cases; undecided")


def test_information_is_marked() -> None:
    whole = reports.raw("conformant")
    informing = next(row for row in whole["header"]["contracts"] if row["level"] == "info")
    case = next(case for case in whole["cases"] if case["contract"] == informing["id"])
    case["verdict"] = "FAIL"

    shown = _render(reports.sample("conformant"), document.parse(whole))

    assert "is recorded (for information only)" in shown.replace("\n      ", " ")
    assert shown.splitlines()[-1].startswith("NO REGRESSION: ")


@pytest.mark.parametrize(("old", "new"), [("conformant", "interrupted"), ("interrupted", "conformant")])
def test_run_that_did_not_end_is_compared_with_none_whichever_it_is(old: str, new: str) -> None:
    there, here = reports.sample(old), reports.sample(new)
    found = comparison.compare(there, here)

    assert found.worse
    assert found.changes == ()
    assert found.incomplete == (("new",) if new == "interrupted" else ("old",))
    shown = _render(there, here)
    assert shown.startswith(f"INCOMPLETE: {found.incomplete[0]}.json is of a run that did not end (it was interrupted;")
    assert "REGRESSION" not in shown


def test_equal_reports() -> None:
    report = reports.sample("conformant")

    assert _render(report, report).endswith(
        "Op policy: no rule moved.\n\nEnvironment: the same machine, software, flags and options.\n\n"
        "NO REGRESSION: every contract and every case has the same verdict."
    )


def test_many_changes_are_cut_and_counted() -> None:
    ids = [f"AMP-LOSS-{number:03}" for number in range(200)]

    shown = _render(_of(dict.fromkeys(ids, "PASS")), _of(dict.fromkeys(ids, "FAIL")))

    assert "... and 160 more contracts" in shown
    assert "REGRESSION: passed there, not here: 200 contracts and 200 cases." in shown


def test_texts_of_a_report_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2J\x07\nREGRESSION"
    for where in ("header/contracts/2/title", "cases/5/reason", "cases/5/evidence/1/name", "header/environment/torch"):
        shown = _render(reports.sample("conformant"), document.parse(reports.changed("failing", where, hostile)))

        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert shown.count("\nREGRESSION") == 1
