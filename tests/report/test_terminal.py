"""The account of a run in the terminal says what a newcomer needs, and nothing that a report could smuggle in."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from conformance.report import document, reach, terminal
from conformance.report.values import Report
from conformance.report.verdicts import Verdict
from tests import reports


def _render(report: Report, *, short: bool = False, width: int = 100, color: bool = False) -> str:
    return terminal.render(report, short=short, width=width, report_path="out/report.json", color=color)


def _flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("conformant", "CONFORMANT: 5 of 6 contracts hold; 1 waived; 1 contract for information only"),
        (
            "incomplete",
            "so this is no pass; 3 of 6 contracts hold so far; 3 not reached",
        ),
        ("interrupted", "INCOMPLETE: the run did not end, so this is no pass; 1 contract failed; 1 of 6 contracts"),
        ("inconclusive", "INCONCLUSIVE: 1 contract COULD NOT BE JUDGED, so this is no pass; 5 of 6 contracts hold"),
        ("nothing", "NOTHING RAN: nothing was executed, so this is no pass; 0 of 6 contracts hold; 6 not reached"),
        ("untestable", "NOT CONFORMANT: 1 contract failed; 5 of 6 contracts hold"),
        ("narrowed", "only; the run was narrowed by -k 'not speed'"),
        ("failing", "NOT CONFORMANT: 3 contracts failed; 1 problem; 4 contracts and 5 cases worse than in the"),
    ],
)
@pytest.mark.parametrize("short", [False, True])
def test_last_lines_are_the_verdict_and_the_report(name: str, verdict: str, short: bool) -> None:
    report = reports.sample(name)
    *_, last = _render(report, short=short).split("\n\n")
    said, path = last.rsplit("\n", 1)

    assert f" on {reach.on(report)}: " in _flat(said)
    assert verdict in _flat(said).replace(f" on {reach.on(report)}: ", ": ")
    assert path == "report: out/report.json"
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize("width", [80, 120])
def test_table_counts_cases_by_chapter(width: int) -> None:
    table = _render(reports.sample("failing"), width=width).split("\n\n")[0].splitlines()

    assert ["scale", "3", "5", "2", "2", "0", "0", "0", "0", "1"] in [row.split() for row in table]
    assert ["all", "7", "12", "6", "3", "0", "0", "1", "1", "1"] in [row.split() for row in table]
    assert all(len(row) <= width for row in table)


def test_wide_table_names_every_verdict_in_full() -> None:
    header = _render(reports.sample("failing"), width=120).splitlines()[0].split()

    assert header[:5] == ["chapter", "contracts", "cases", "pass", "fail"]
    assert header[5:] == ["waived", "unsupported", "untestable", "inconclusive", "error"]


def test_failed_contract_has_everything_an_engineer_needs() -> None:
    shown = _render(reports.sample("failing"))
    block = next(part for part in shown.split("\n\n") if part.startswith("AMP-SCALE-002"))

    flat = _flat(block)
    assert "The loss scale is halved after a step with an inf" in flat
    assert "promised After update() that follows a step with an inf or a NaN in any gradient" in flat
    assert "(must, documented)" in flat
    assert "source torch.amp.GradScaler docstring, parameter backoff_factor" in flat
    assert (
        "seen new scale: 65536 (required: exactly 32768) in 2 cases: halving:device-inf, halving:device--inf on cpu"
        in flat
    )
    assert "on cpu: 2 of 3 cases" in flat
    assert "usual cause found_inf is not set or not passed on" in flat
    assert "next step Print found_inf after unscale_" in flat
    assert (
        "run just this pytest conformance --contract AMP-SCALE-002 --device cpu --device fake:cuda --seed 3\n" in block
    )
    assert '      scaler = torch.amp.GradScaler("cpu")\n' in block


def test_exception_is_shown_with_the_end_of_its_traceback() -> None:
    whole = reports.raw("failing")
    case = next(case for case in whole["cases"] if case["detail"] and case["verdict"] == "FAIL")
    case["detail"] = "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "<site-packages>/_pytest/python.py", line 1, in pytest_pyfunc_call',
            '  File "<suite>/conformance/chapters/loss/test_loss.py", line 2, in test_it',
            "    the check()",
            "    ^^^~~~^^^^^",
            *(f"  frame {number}" for number in range(50)),
            "RuntimeError: it broke",
        ]
    )

    shown = _render(document.parse(whole))

    start, end = shown.index("  raised from:\n"), shown.index("RuntimeError: it broke")
    frames = shown[start:end].splitlines()
    assert len(frames) < 20
    assert "conformance/chapters/loss/test_loss.py" in frames[1]
    assert "    the check()" in frames[2]
    assert "frame 49" in frames[-2]
    assert not any("_pytest" in frame or "^" in frame for frame in frames)


def test_many_failures_are_listed_again_in_short() -> None:
    whole = reports.raw("improved")
    whole["footer"] = None
    for case in whole["cases"]:
        case["verdict"] = "FAIL"

    shown = _render(document.parse(whole))

    index = shown[shown.index("All that failed, in short") :]
    assert "FAIL AMP-LOSS-001  cross_entropy of 16-bit logits is float32 in value (5/5)" in index
    assert "AMP-SPEED-001" not in index
    assert "in short" not in _render(reports.sample("failing"))


def test_failures_and_errors_are_last_where_the_end_of_a_log_is_kept() -> None:
    shown = _render(reports.sample("failing"))

    others = [shown.index(words) for words in ("Inconclusive: 1 case", "Untestable: 1 case")]
    assert max(others) < shown.index("Failed: 2 contracts") < shown.index("Errors: ") < shown.index("NOT CONFORMANT")


def test_errors_of_the_suite_are_apart_from_failures() -> None:
    shown = _render(reports.sample("failing"))

    failed, errors = shown.index("Failed: 2 contracts"), shown.index("Errors: the suite itself broke in 1 case")
    assert failed < errors < shown.index("NameError: name 'scalr' is not defined")
    assert "AMP-SCALE-003" not in shown[failed:errors]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("conformant", "Waived: 1 contract known not to hold (1 case)"),
        ("conformant", "by amp-conformance maintainers, until 2027-12-31: AMP-MEMORY-001 1 "),
        ("conformant", "why, and what was seen: python -m conformance explain waivers REPORT"),
        ("narrowed", "Unsupported: 1 case ------------------- 1 case: the device has no bf16 AMP-BF16-001"),
        ("untestable", "could not be tested, which under --gpu fails a must: the device has too little memory"),
        ("untestable", "For information: facts that differ, which count for no verdict"),
        ("inconclusive", "1 case: another process used the device meanwhile AMP-BF16-001"),
        ("incomplete", "Not reached: 4 contracts"),
        ("incomplete", "the run did not get that far: AMP-SCALE-003, AMP-BF16-001, AMP-MEMORY-001, AMP-SPEED-001"),
        ("interrupted", "the run was interrupted before: AMP-SCALE-002, AMP-SCALE-003"),
        ("failing", "the waiver of AMP-SCALE-001 (*) is no longer needed: a case that it names passes"),
        ("failing", "passed there, not here (9): AMP-LOSS-001, AMP-SCALE-002"),
    ],
)
def test_what_else_is_said(name: str, said: str) -> None:
    assert said in _flat(_render(reports.sample(name)))


def test_failing_fact_for_information_is_no_failed_contract() -> None:
    assert "Failed: 1 contract\n" in _render(reports.sample("untestable"))


def test_many_failing_cases_are_counted_and_not_listed() -> None:
    whole = reports.raw("improved")
    whole["footer"] = None
    model = whole["cases"][0]
    whole["cases"] = [
        {
            **model,
            "id": f"AMP-LOSS-001[cross_entropy:device-{number}]",
            "verdict": "FAIL",
            "evidence": [{**model["evidence"][0], "measured": f"odd {number}", "holds": False}],
        }
        for number in range(500)
    ]

    shown = _render(document.parse(whole))

    assert "dtype of the loss: odd 2 (required: exactly torch.float32) in 1 case: cross_entropy:device-2" in _flat(
        shown
    )
    assert "odd 3" not in shown
    assert "... and 497 more cases that saw something else" in shown
    assert "on            cpu: 500 of 500 cases" in shown


def test_excused_changes_are_shown_with_their_excuse() -> None:
    known = [
        {"id": "AMP-LOSS-001", "after": "WAIVED", "excuse": "waived: broken upstream"},
        {"id": "AMP-LOSS-001[x]", "after": "WAIVED", "excuse": "waived: broken upstream"},
    ]
    whole = reports.raw("conformant")
    whole["footer"]["baseline"] = {"path": "old.json", "regressed": [], "gone": [], "known": known}

    shown = _flat(_render(document.parse(whole)))

    assert "nothing that passed there is worse here (2 excused)." in shown
    assert "excused (1): AMP-LOSS-001[x]; waived: broken upstream" in shown


def test_clean_comparison_with_a_baseline_is_said() -> None:
    whole = reports.changed("conformant", "footer/baseline", {"path": "old.json", "regressed": [], "gone": []})

    shown = _render(document.parse(whole))

    assert "Against the baseline old.json: nothing that passed there is worse here." in shown


@pytest.mark.parametrize(
    "line",
    [
        "FAIL AMP-SCALE-002  The loss scale is halved after a step with an inf: new scale: 65536",
        "ERROR AMP-SCALE-003  A disabled GradScaler leaves losses",
        "PROBLEM  the waiver of AMP-SCALE-001",
        "REGRESSED  AMP-LOSS-001",
    ],
)
def test_short_form_has_one_line_for_each_failure(line: str) -> None:
    shown = _render(reports.sample("failing"), short=True, width=120)

    assert line in shown
    assert "next step" not in shown
    assert len(shown.splitlines()) < 30


def test_short_form_names_what_was_waived() -> None:
    title = reports.sample("conformant").contracts["AMP-MEMORY-001"].title
    assert f"WAIVED AMP-MEMORY-001  1 case: {title}" in _render(reports.sample("conformant"), short=True, width=120)


def test_short_form_says_what_could_not_be_judged() -> None:
    shown = _render(reports.sample("inconclusive"), short=True, width=120)

    assert "INCONCLUSIVE AMP-BF16-001  1 case: another process used the device meanwhile" in shown


def test_each_waived_contract_is_one_line_however_much_its_waiver_says() -> None:
    whole = reports.raw("conformant")
    model = next(case for case in whole["cases"] if case["verdict"] == "WAIVED")
    whole["footer"] = None
    model["waiver"] = "word " * 500
    whole["cases"] += [
        {**model, "id": f"AMP-MEMORY-001[other:device-{number}]", "waiver": f"reason {number}"} for number in range(40)
    ]
    lines = _render(document.parse(whole), width=80).splitlines()

    start = lines.index("Waived: 1 contract known not to hold (41 cases)")
    assert lines[start + 2].startswith("  AMP-MEMORY-001  41  ")
    assert len(lines[start + 2]) <= 80
    assert lines[start + 3].startswith("  why, and what was seen")


@pytest.mark.parametrize(("verdict", "said"), [("UNSUPPORTED", "hold (1 of them in part); 1 w"), ("PASS", "hold; 1 w")])
def test_verdict_of_some_cases_alone_is_told_apart(verdict: str, said: str) -> None:
    whole = reports.raw("conformant")
    whole["footer"] = None
    next(case for case in whole["cases"] if case["contract"] == "AMP-LOSS-001")["verdict"] = verdict

    assert said in _flat(_render(document.parse(whole))).replace(" so far", "")


@pytest.mark.parametrize("name", reports.NAMES)
@pytest.mark.parametrize("width", [80, 120])
def test_prose_keeps_to_the_width(name: str, width: int) -> None:
    shown = _render(reports.sample(name), width=width)
    prose = [line for line in shown.splitlines() if not line.startswith(("      ", "  run just this", "report"))]

    assert max(map(len, prose)) <= width


@pytest.mark.parametrize("name", reports.NAMES)
@pytest.mark.parametrize("short", [False, True])
def test_control_codes_only_when_asked_for(name: str, short: bool) -> None:
    plain = _render(reports.sample(name), short=short)
    coloured = _render(reports.sample(name), short=short, color=True)

    assert not re.search(r"[^\n -~]", plain)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert "\x1b[" in coloured


_HOSTILE = "\x1b[2Jcleared\x07\r\x9b31m\u202edesrever\u200b\ud800 fine\nAMP-FAKE-001 CONFORMANT"


@pytest.mark.parametrize(
    "where",
    [
        "header/contracts/2/title",
        "header/contracts/2/statement",
        "header/contracts/2/failure",
        "header/chapters/0/name",
        "header/options/selection",
        "cases/5/reason",
        "cases/5/id",
        "cases/5/target",
        "cases/5/snippet",
        "cases/5/evidence/1/name",
        "cases/5/evidence/1/measured",
        "cases/8/detail",
        "footer/problems/0",
        "footer/baseline/path",
        "footer/baseline/regressed/0",
    ],
)
@pytest.mark.parametrize("short", [False, True])
def test_texts_of_a_report_cannot_control_the_terminal(where: str, short: bool) -> None:
    whole: dict[str, Any] = reports.changed("failing", where, _HOSTILE)
    for contract in whole["header"]["contracts"]:
        if where == "header/chapters/0/name" and contract["chapter"] == "loss":
            contract["chapter"] = _HOSTILE

    shown = _render(document.parse(whole), short=short)

    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e\ud800]", shown)
    if not where.endswith(("snippet", "detail")):
        assert not re.search("^AMP-FAKE-001", shown, re.MULTILINE)


def _with_program(program: str) -> str:
    failed = reports.sample("failing")
    case = next(case for case in failed.cases if case.verdict is Verdict.FAIL)
    cases = [dataclasses.replace(one, snippet=program if one is case else None) for one in failed.cases]
    changed = dataclasses.replace(failed, cases=tuple(cases))
    return terminal.render(changed, short=False, width=100, report_path="r")


def test_of_a_long_program_the_end_is_shown_and_the_command_that_prints_all() -> None:
    page = _with_program(
        "\n".join([*("# head", "import torch"), *("x = 1",) * 60, "def test_it():", "    pass", "test_it()"])
    )

    assert re.search(r"with torch alone, 65 lines: .*explain snippet REPORT --contract AMP-\w+-\d+ > case.py", page)
    assert "it ends with:\n      def test_it():\n          pass\n      test_it()" in page
    assert "x = 1" not in page


def test_of_a_long_program_the_shorter_account_at_its_head_is_shown() -> None:
    page = _with_program("\n".join(["# head", "# in short:", "#     scaler.step()", *("x = 1",) * 60]))

    assert "in short:\n      scaler.step()" in page
    assert "x = 1" not in page


def test_a_cause_is_told_once_however_it_is_worded() -> None:
    whole = reports.raw("improved")
    whole["footer"] = None
    model = {**whole["cases"][0], "verdict": "UNSUPPORTED", "evidence": []}
    core = "could not create a primitive for the LSTM"
    wordings = [
        f"RuntimeError: {core}. Run the workload with VERBOSE=all to get more information.",
        f"{core}. Run the workload with VERBOSE=all to get more information.",
        f"torch has no lstm in torch.float16 for this CPU: {core}",
        f"torch has no step-lstm in torch.float16 for this CPU: {core}",
        "ctc_loss is not on the float32 list of cuda (its policy: unlisted)",
        "binary_cross_entropy is not on the float32 list of xpu (its policy: banned)",
        "binary_cross_entropy is not on the float32 list of mps (its policy: banned)",
        "RuntimeError: another thing. It has a second sentence.",
    ]
    whole["cases"] = [
        {
            **model,
            "id": f"AMP-LOSS-001[cross_entropy:device-{number}]",
            "reason": reason,
            "target": "fake:" + ("cuda" if "cuda" in reason else "xpu" if "xpu" in reason else "mps"),
            "parameters": {"op": reason.split()[0]} if "list of" in reason else {},
        }
        for number, reason in enumerate(wordings)
    ]
    header = whole["header"]
    header["targets"] += [{**header["targets"][0], "name": f"fake:{one}", "slot": one} for one in ("xpu", "mps")]

    shown = _render(document.parse(whole), width=80)

    assert shown.count(core) == 1
    assert f"4 cases: {core}\n" in shown
    assert "3 cases: ctc_loss is not on the float32 list of cuda (its policy: unlisted); likewise" in _flat(shown)
    assert "likewise binary_cross_entropy xpu, binary_cross_entropy mps AMP-LOSS-001" in _flat(shown)
    assert "1 case: RuntimeError: another thing. It has a second sentence." in _flat(shown)
