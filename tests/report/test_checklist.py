"""The acceptance checklist holds everything that a buyer signs for, and shows a report's texts as they are."""

from __future__ import annotations

import re

import pytest

from conformance.report import checklist, document, text
from tests import reports


@pytest.mark.parametrize("name", reports.NAMES)
def test_every_contract_is_there_in_plain_words(name: str) -> None:
    report = reports.sample(name)

    page = checklist.render(report)

    for contract in report.header.contracts:
        assert f"#### {contract.id}: {text.markdown(contract.title)}\n" in page
        assert text.markdown(contract.statement) in page
        assert text.markdown(contract.source) in page


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("conformant", "**Verdict: CONFORMANT.** Every contract that was judged holds"),
        ("failing", "**Verdict: NOT CONFORMANT.** At least one contract does not hold"),
        ("inconclusive", "**Verdict: INCONCLUSIVE.** No contract was seen to fail"),
        ("incomplete", "**Verdict: INCOMPLETE.** The run did not come to its end. Nothing here is a pass"),
        ("interrupted", "**Verdict: INCOMPLETE.**"),
        ("conformant", "| **all** | 7 | 6 | 0 | 0 | 1 | 0 | 0 | 0 | 0 |"),
        ("conformant", "| suite | version 0.1.0, commit 3f9d2c41b8e07a56d1c2e9f04b7a8d6c5e1f2a30 |"),
        ("failing", "WITH CHANGES THAT ARE NOT COMMITTED"),
        ("incomplete", "| ended | it did not end |"),
        ("inconclusive", "| driver | 575.57.08 |"),
        ("inconclusive", "| name | NVIDIA H100 80GB HBM3 |"),
        ("failing", "| torch.backends.cuda.matmul.allow_tf32 | true |"),
        ("failing", "- AMP-SCALE-002: The loss scale is halved after a step with an inf\n- AMP-SCALE-003: A disabled"),
        (
            "untestable",
            "What makes the machine not conformant:\n\n- AMP-BF16-001: bfloat16 autocast trains without a loss",
        ),
        ("conformant", "| initial scale | 65536 | exactly 65536 | 1 |"),
        ("conformant", "| error against float64 | 3.4e-08 (of 2, the nearest to its bound) | at most 1.2e-07 | 2 |"),
        ("conformant", "| final loss | 0.0231 | between 0 and 0.05 | 1 |"),
        ("failing", "| **DOES NOT HOLD:** new scale | 65536 | exactly 32768 | 2 |"),
        ("failing", '- FAIL: AMP-LOSS-001\\[cross_entropy:fake-cuda-fp16\\] on fake:cuda: raised RuntimeError: "nll'),
        ("conformant", "**RECORDED** (1 case on cpu; info, engineering: measured)"),
        ("incomplete", "**NOT REACHED** (no case; must, documented"),
        ("conformant", "| reason | On the CPU the input is kept in float32 as well, because the 16-bit kernel needs"),
        ("conformant", "| link | https://github.com/pytorch/pytorch/issues/112583 |"),
        ("conformant", "| ends | 2027-12-31 |"),
        ("conformant", "Excused although it does not hold: 1 case of 1 contract."),
        ("failing", "| state | NO LONGER NEEDED: a case that it names passes; names 1 case of this run |"),
        ("improved", "## 3. What was waived\n\nNothing."),
        ("conformant", "- No accelerator was judged: the targets are the CPU or fake ones."),
        ("conformant", "- The depth was standard; deeper levels run more cases of the same contracts."),
        ("narrowed", "- The run was narrowed by -k 'not speed': nothing beyond that was judged."),
        ("narrowed", "- UNSUPPORTED: the device has no bf16: 1 case of AMP-BF16-001"),
        ("narrowed", "- NOT REACHED: AMP-SPEED-001, The speed of matmul under AMP"),
        ("untestable", "- UNTESTABLE: the device has too little memory: 1 case of AMP-BF16-001"),
        ("failing", "- passed in conformant.json, not here: AMP-SCALE-002\n"),
        ("failing", "- the waiver of AMP-SCALE-001 (\\*) is no longer needed"),
    ],
)
def test_what_is_said(name: str, said: str) -> None:
    assert said in checklist.render(reports.sample(name))


def test_accelerator_that_was_judged_is_not_missed() -> None:
    assert "No accelerator was judged" not in checklist.render(reports.sample("inconclusive"))


def test_there_are_lines_to_sign_on_and_the_file_is_named() -> None:
    page = checklist.render(reports.sample("conformant"), digest="0a1b")

    assert page.count("SHA-256 `0a1b`") == 2
    assert re.search(r"\| +\| name \| date \| signature \|\n.*\n\| for the supplier \| _+ \| _+ \| _+ \|", page)
    assert re.search(r"\n\| for the buyer \| _+ \| _+ \| _+ \|\n$", page)


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

    page = checklist.render(document.parse(whole))

    assert "| n | 3 (of 3, the nearest to its bound) | at least 2 | 3 |" in page
    assert "| **DOES NOT HOLD:** n | nan | at least 2 | 1 |" in page


def test_many_measurements_are_cut_and_counted() -> None:
    whole = reports.raw("improved")
    evidence = whole["cases"][0]["evidence"][0]
    whole["cases"][0]["evidence"] = [{**evidence, "name": f"fact {number}"} for number in range(40)]

    page = checklist.render(document.parse(whole))

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
    page = checklist.render(document.parse(reports.changed("failing", where, _HOSTILE)))

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
    page = checklist.render(document.parse(whole))

    assert f"**PASS in {len(cases) - 1} of {len(cases)} cases, UNSUPPORTED in 1** (" in page
    assert f"- UNSUPPORTED: {cases[1]['id']}".replace("[", "\\[").split(":dev")[0] in page
    assert "In part only, because other cases of the same contract came to another verdict: 1 of the " in page


def test_waivers_that_were_not_called_upon_are_named_in_one_sentence() -> None:
    whole = reports.raw("failing")
    idle = next(waiver for waiver in whole["footer"]["waivers"] if waiver["state"] == "idle")
    page = checklist.render(document.parse(whole))

    assert f"Not called upon in this run: 1 waiver, of {text.markdown(idle['contract'])}." in page
    assert text.markdown(idle["reason"]) not in page
    assert "NO LONGER NEEDED" in page
