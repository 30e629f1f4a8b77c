"""The acceptance checklist holds everything that a buyer signs for, and shows a report's texts as they are."""

from __future__ import annotations

import html
import re

import pytest

from conformance.report import checklist, document, text
from tests import reports
from tests.report import test_browser


@pytest.mark.parametrize("name", reports.NAMES)
def test_every_contract_is_there_in_plain_words(name: str) -> None:
    report = reports.sample(name)

    page = checklist.render(report, with_annex=True)

    for contract in report.header.contracts:
        assert f"#### {contract.id}: {text.markdown(contract.title)}\n" in page
        assert text.markdown(contract.statement) in page
        assert text.markdown(contract.source) in page


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("conformant", "**Verdict: CONFORMANT on cpu and fake:cuda.** Every contract that was judged holds"),
        ("failing", "**Verdict: NOT CONFORMANT on cpu and fake:cuda.** At least one contract does not hold"),
        ("inconclusive", "**Verdict: INCONCLUSIVE on cuda:0 (NVIDIA H100 80GB HBM3).** No contract was seen to fail"),
        (
            "incomplete",
            "**Verdict: INCOMPLETE on cpu and fake:cuda.** The run did not come to its end. Nothing here is a pass",
        ),
        ("interrupted", "**Verdict: INCOMPLETE on cpu and fake:cuda.**"),
        ("conformant", "| Losses are computed in full precision | holds: 1 of 1 |"),
        ("conformant", "| Mixed precision saves the memory that it should and leaks none | fails and is excused: 1 |"),
        ("conformant", "| what was run | 12 cases of 7 contracts at level standard, AMP dtypes: both, seed 0 |"),
        ("failing", "| Losses are computed in full precision | **FAILS: 1 of 1 contract** |"),
        ("failing", "- problem of the run: the waiver of AMP-SCALE-001"),
        ("conformant", "| suite | version 0.1.0, commit 3f9d2c41b8e07a56d1c2e9f04b7a8d6c5e1f2a30 |"),
        ("failing", "WITH CHANGES THAT ARE NOT COMMITTED"),
        ("incomplete", "| ended | it did not end |"),
        ("inconclusive", "| driver | 575.57.08 |"),
        ("inconclusive", "| name | NVIDIA H100 80GB HBM3 |"),
        ("failing", "| torch.backends.cuda.matmul.allow_tf32 | true |"),
        (
            "failing",
            "- AMP-SCALE-002 The loss scale is halved after a step with an inf (2 of 3 cases): new scale: 65536",
        ),
        ("untestable", "## What does not hold\n\n- AMP-BF16-001 bfloat16 autocast trains without a loss"),
        ("conformant", "| initial scale | 65536 | exactly 65536 | 1 |"),
        ("conformant", "| error against float64 | 3.4e-08 (of 2, the nearest to its bound) | at most 1.2e-07 | 2 |"),
        ("conformant", "| final loss | 0.0231 | between 0 and 0.05 | 1 |"),
        ("failing", "| **DOES NOT HOLD: new scale** | 65536 | exactly 32768 | 2 |"),
        ("failing", '- FAIL: AMP-LOSS-001\\[cross_entropy:fake-cuda-fp16\\] on fake:cuda: raised RuntimeError: "nll'),
        ("conformant", "**RECORDED** (1 case on cpu; info, engineering: measured"),
        ("incomplete", "**NOT REACHED** (no case; must, documented"),
        ("conformant", "| reason | On the CPU the input is kept in float32 as well, because the 16-bit kernel needs"),
        ("conformant", "| link | https://github.com/pytorch/pytorch/issues/112583 |"),
        ("conformant", "| ends | 2027-12-31 |"),
        ("conformant", "Excused although it does not hold: 1 case of 1 contract."),
        ("failing", "| state | NO LONGER NEEDED: a case that it names passes; names 1 case of this run |"),
        ("improved", "excuse says so\n\nNothing."),
        ("conformant", "- No accelerator was judged: the targets are the CPU or fake ones."),
        ("conformant", "- The depth was standard; deeper levels run more cases of the same contracts."),
        ("narrowed", "- The run was narrowed by -k 'not speed': nothing beyond that was judged."),
        ("narrowed", "- unsupported: the device has no bf16: AMP-BF16-001"),
        ("narrowed", "- not reached: "),
        ("untestable", "- untestable: the device has too little memory: AMP-BF16-001"),
        ("failing", "- passed in conformant.json, not here: AMP-SCALE-002\n"),
        ("failing", "- the waiver of AMP-SCALE-001 (\\*) is no longer needed"),
    ],
)
def test_what_is_said(name: str, said: str) -> None:
    assert said in checklist.render(reports.sample(name), with_annex=True)


def test_accelerator_that_was_judged_is_not_missed() -> None:
    assert "No accelerator was judged" not in checklist.render(reports.sample("inconclusive"))


def test_there_are_lines_to_sign_on_and_the_file_is_named() -> None:
    page = checklist.render(reports.sample("conformant"), digest="0a1b")

    assert "| report | SHA-256 of report.json 0a1b |" in page
    assert "from the report with the SHA-256 0a1b" in page
    assert re.search(r"\| +\| name \| date \| signature \|\n.*\n\| for the supplier \| +\| +\| +\|\n", page)
    assert re.search(r"\n\| for the buyer \| +\| +\| +\|\n$", page)


def test_numbers_that_are_not_finite_are_not_the_nearest_to_a_bound() -> None:
    whole = reports.raw("improved")
    whole["footer"] = None
    measured = ["inf", 5.0, "nan", 3.0]
    whole["cases"] = [
        {
            **whole["cases"][0],
            "id": f"AMP-LOSS-001[x:{number}]",
            "evidence": [
                {"name": "n", "measured": value, "relation": ">=", "bound": 2.0, "unit": "", "holds": value != "nan"}
            ],
            "verdict": "PASS" if value != "nan" else "FAIL",
        }
        for number, value in enumerate(measured)
    ]

    page = checklist.render(document.parse(whole), with_annex=True)

    assert "| n | 3 (of 3, the nearest to its bound) | at least 2 | 3 |" in page
    assert "| **DOES NOT HOLD: n** | nan | at least 2 | 1 |" in page


def test_many_measurements_are_cut_and_counted() -> None:
    whole = reports.raw("improved")
    evidence = whole["cases"][0]["evidence"][0]
    whole["cases"][0]["evidence"] = [{**evidence, "name": f"fact {number}"} for number in range(40)]

    page = checklist.render(document.parse(whole), with_annex=True)

    assert page.count("| fact ") == 8
    assert "further measurements in the report." in page


_HOSTILE = "<script>alert(1)</script> [x](javascript:1) ![i](http://h/i) `c` **b** __init__ | cell\n# heading\n- item"


@pytest.mark.parametrize(
    "where",
    [
        "header/contracts/0/title",
        "header/contracts/0/statement",
        "header/contracts/0/source",
        "header/chapters/0/title",
        "header/chapters/0/summary",
        "header/environment/cpu",
        "header/variables/OMP_NUM_THREADS",
        "header/targets/0/name",
        "header/targets/0/probe/name",
        "header/options/selection",
        "cases/4/target",
        "cases/5/id",
        "cases/5/evidence/1/name",
        "cases/5/evidence/1/measured",
        "cases/8/reason",
        "footer/waivers/0/reason",
        "footer/problems/0",
        "footer/baseline/path",
    ],
)
def test_texts_of_a_report_are_no_markup(where: str) -> None:
    page = checklist.render(document.parse(reports.changed("failing", where, _HOSTILE)), with_annex=True)

    assert "&lt;script&gt;" in page
    assert not re.search(r"<|(?<!\\)\[x(?<!\\)\]|(?<!\\)`c|^# heading|^- item|[^\\]\*\*b", page, re.MULTILINE)
    tables = [row for row in page.splitlines() if row.startswith("|")]
    assert not any(re.search(r"(?<!\\)\| cell", row) for row in tables)


@pytest.mark.parametrize(
    ("plain", "escaped"),
    [
        ("torch.is_autocast_enabled", "torch.is_autocast_enabled"),
        ("__init__", "\\_\\_init\\_\\_"),
        ("a*b", "a\\*b"),
        ("# x", "\\# x"),
        ("1. x", "1\\. x"),
        ("- x", "\\- x"),
        ("-1.5", "-1.5"),
        ("---", "--\\-"),
        ("a\n\nb", "a b"),
        ("x < y & z", "x &lt; y &amp; z"),
        ("\\", "\\\\"),
    ],
)
def test_markdown_escapes(plain: str, escaped: str) -> None:
    assert text.markdown(plain) == escaped


def test_verdict_of_a_few_cases_does_not_hide_the_others() -> None:
    whole = reports.raw("conformant")
    whole["footer"] = None
    cases = [case for case in whole["cases"] if case["contract"] == "AMP-LOSS-001"]
    cases[1].update(verdict="UNSUPPORTED", reason="no such unit")
    page = checklist.render(document.parse(whole), with_annex=True)

    assert f"**PASS in {len(cases) - 1} of {len(cases)} cases, UNSUPPORTED in 1** (" in page
    assert f"- UNSUPPORTED: {cases[1]['id']}".replace("[", "\\[").split(":dev")[0] in page


def test_waivers_that_were_not_called_upon_are_named_in_one_sentence() -> None:
    whole = reports.raw("failing")
    idle = next(waiver for waiver in whole["footer"]["waivers"] if waiver["state"] == "idle")
    page = checklist.render(document.parse(whole), with_annex=True)

    assert f"Not called upon in this run: 1 waiver, of {text.markdown(idle['contract'])}." in page
    assert text.markdown(idle["reason"]) not in page
    assert "NO LONGER NEEDED" in page


@pytest.mark.parametrize("name", reports.NAMES)
def test_html_says_what_markdown_says_and_runs_nothing(name: str) -> None:
    report = reports.sample(name)

    page = checklist.render(report, digest="0a1b", form="html", with_annex=True)

    assert "<script" not in page
    assert "content=\"default-src 'none'; style-src 'sha256-" in page
    plain = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for word in re.findall(r"[\w-]{4,}", html.unescape(checklist.render(report, digest="0a1b", with_annex=True))):
        assert word.strip("_") in plain


def test_texts_of_a_report_are_no_markup_in_html() -> None:
    whole = reports.raw("failing")
    for where in ("header/contracts/0/title", "header/environment/cpu", "cases/8/reason", "footer/problems/0"):
        reports.put(whole, where, _HOSTILE)

    page = checklist.render(document.parse(whole), form="html", with_annex=True)

    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("failing", [0, 1, 40, 100, 690])
def test_every_failure_is_named_however_many_there_are(failing: int) -> None:
    report = test_browser.many(700, failing=failing)

    page = checklist.render(report)

    section = page[page.index("## What does not hold") : page.index("## What was waived")]
    for id, cases in report.cases_of.items():
        assert not cases or (cases[0].verdict.value == "FAIL") == _named(id, section)


def _named(id: str, section: str) -> bool:
    """Whether a list of ids holds this one, alone or in a range."""
    family, _, number = id.rpartition("-")
    if family not in section:
        return False
    ranges = re.findall(r"(\d{3,}) to (\d{3,})", section)
    return bool(re.search(rf"\b{number}\b", section)) or any(
        int(first) <= int(number) <= int(last) for first, last in ranges
    )


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (["001", "002", "003", "007"], ["001 to 003", "007"]),
        (["001", "002"], ["001", "002"]),
        (["x", "1", "2", "3"], ["x", "1 to 3"]),
        ([], []),
    ],
)
def test_three_consecutive_numbers_are_a_range(numbers: list[str], said: list[str]) -> None:
    assert list(checklist._ranges(numbers)) == said
