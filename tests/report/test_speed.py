"""The speed-ups in a report: told as a table with what explains them, in a line, and refused where they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.harness.check import Case
from conformance.report import comparison, diff, document, speed, terminal
from conformance.report.values import Report
from tests import reports
from tests.harness.test_case import _CONTRACT

FIGURES = {"ratio": 2.5, "low": 2.25, "high": 2.75, "diagnosis": "step 36.3 µs, casts 60%: cast-bound"}
KEYS = {
    "matmul/compute/bf16/fp32": FIGURES,
    "matmul/compute/bf16/tf32": FIGURES | {"ratio": 1.5, "low": 1.4, "high": 1.6, "diagnosis": ""},
    "step-mlp/small/bf16/fp32": FIGURES | {"ratio": 0.8, "low": 0.7, "high": 0.9, "diagnosis": "host-bound"},
}


def _raw(keys: dict[str, Any] | None = None) -> dict[str, Any]:
    """The sample of a conformant run, one case of which holds speed-ups."""
    raw = reports.raw("conformant")
    case = next(case for case in raw["cases"] if case["target"] == "cpu")
    case["evidence"] += [
        {
            "name": key,
            "measured": [list(pair) for pair in figures.items()] if isinstance(figures, dict) else figures,
            "relation": None,
            "bound": None,
            "unit": speed.UNIT,
            "holds": True,
        }
        for key, figures in (KEYS if keys is None else keys).items()
    ]
    return raw


def _report(keys: dict[str, Any] | None = None) -> Report:
    return document.parse(_raw(keys))


def test_a_case_records_what_a_report_tells() -> None:
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={})
    case.speedup("matmul/compute/bf16/fp32", FIGURES)

    (evidence,) = case.evidence
    found = _report({evidence.name: dict(evidence.measured)})
    (row,) = speed.speedups(found)
    assert evidence.unit == speed.UNIT
    assert (row.key, row.ratio, row.low, row.high) == ("matmul/compute/bf16/fp32", 2.5, 2.25, 2.75)
    assert row.diagnosis == FIGURES["diagnosis"]


def test_the_story_is_a_table_and_its_reasons() -> None:
    story = speed.render(_report())

    assert story is not None
    lines = story.splitlines()
    assert lines[0] == "Speed of AMP on cpu: how many times as fast as fp32, with its interval"
    assert "bf16 over fp32  " in lines[2]
    assert "bf16 over fp32 with TF32 on" in lines[2]
    assert any(
        "matmul, compute" in line and "2.50 [2.25, 2.75]" in line and "1.50 [1.40, 1.60]" in line for line in lines
    )
    assert any("step-mlp, small" in line and "0.80 [0.70, 0.90]" in line and line.endswith("-") for line in lines)
    assert lines[lines.index("cast-bound") + 1] == "  matmul/compute/bf16/fp32: step 36.3 µs, casts 60%"
    assert lines[lines.index("host-bound") + 1] == "  step-mlp/small/bf16/fp32"
    assert not any("matmul/compute/bf16/tf32" in line for line in lines)  # nothing was said of it


def test_what_the_device_does_not_tell_is_said_once() -> None:
    unknown = "Not known on cpu, and left out: what the host takes of a step"
    every = {"host share": 0.1, "ceiling TFLOP/s": 990.0, "break-even rows": 72}
    without, known = (speed.render(_report({"a/b/bf16/fp32": FIGURES | more})) for more in ({}, every))

    assert without is not None
    assert without.count(unknown) == 1
    assert known is not None
    assert "Not known" not in known


def test_doubts_that_differ_in_numbers_alone_are_said_once() -> None:
    keys = {
        f"{subject}/small/bf16/fp32": FIGURES | {"spoiled": f"busy for {share}% of 1.5 s"}
        for subject, share in (("a", 37), ("b", 40.5), ("c", 9))
    }
    keys["d/small/bf16/fp32"] = FIGURES | {"spoiled": "too hot"}
    story = speed.render(_report(keys))

    assert story is not None
    assert "? a/small/bf16/fp32: busy for 37% of 1.5 s; likewise b/small/bf16/fp32, c/small/bf16/fp32" in story
    assert "? d/small/bf16/fp32: too hot" in story


def test_on_cuda_the_mode_of_the_baseline_is_named() -> None:
    raw = _raw({"matmul/compute/bf16/fp32": FIGURES})
    for target in raw["header"]["targets"]:
        target["device_type"] = "cuda"
    story = speed.render(document.parse(raw))

    assert story is not None
    assert "bf16 over fp32 with TF32 off" in story


def test_the_summary_has_a_line_for_each_device() -> None:
    page = terminal.render(_report(), short=False, width=200, report_path="report.json")

    assert (
        "AMP on cpu: 0.80 (step-mlp, small, bf16) to 2.50 (matmul, compute, bf16) times as fast as fp32; "
        "1.50 (matmul, compute, bf16) to 1.50 (matmul, compute, bf16) times as fast as fp32 with TF32 on"
    ) in page


@pytest.mark.parametrize(
    ("figures", "doubt"),
    [
        ({"spoiled": "the machine is busy"}, "the machine is busy"),
        ({"low": 1.0, "high": 3.0}, "the interval is too wide to say anything"),
    ],
    ids=["spoiled", "wide"],
)
def test_a_ratio_in_doubt_is_marked_and_not_explained(figures: dict[str, Any], doubt: str) -> None:
    key = "matmul/compute/bf16/fp32"
    report = _report({key: FIGURES | figures})
    story = speed.render(report)

    assert story is not None
    assert "] ?" in story
    assert f"? {key}: {doubt}" in story
    assert "cast-bound" not in story
    assert speed.brief(report) == [f"AMP on cpu: no speed-up can be stated, as {doubt}"]


def test_what_an_upgrade_did_to_speed_is_told() -> None:
    key = "matmul/compute/bf16/fp32"
    old, new = _report(), _report(KEYS | {key: FIGURES | {"ratio": 1.5, "low": 1.4, "high": 1.6}})

    assert speed.differences(old, old) == []
    assert speed.differences(old, new) == [f"{key} on cpu: 2.50 [2.25, 2.75] -> 1.50 [1.40, 1.60]"]
    shown = diff.render(old, new, comparison.compare(old, new), names=("old", "new"))
    assert "Speed-ups: what differs by more than both intervals (1 measurement)" in shown
    assert shown.endswith(
        "NO REGRESSION: every contract and every case has the same verdict. 1 speed-up differs, above."
    )


def test_stories_are_of_the_contracts_that_are_named() -> None:
    report = _report()
    contract = speed.speedups(report)[0].case.contract

    assert speed.render(report, contracts=(contract,)) == speed.render(report)
    assert speed.render(report, contracts=("AMP-NOWHERE-*",)) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"matmul": FIGURES}, "does not read subject/size/dtype/baseline"),
        ({"a/b/c/": FIGURES}, "does not read subject/size/dtype/baseline"),
        ({"a/b/c/d": {"ratio": 2.0, "low": 1.0}}, "high is 'None', not a ratio"),
        ({"a/b/c/d": FIGURES | {"ratio": -1.0}}, "ratio is '-1.0', not a ratio"),
        ({"a/b/c/d": FIGURES | {"low": True}}, "low is 'True', not a ratio"),
        ({"a/b/c/d": FIGURES | {"ratio": 9.0}}, "the ratio 9 lies outside its interval"),
        ({"a/b/c/d": [1, 2]}, "not pairs of a figure's name and its value"),
    ],
    ids=["short", "empty", "missing", "negative", "bool", "outside", "numbers"],
)
def test_what_is_no_speedup_is_refused(
    keys: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(_raw(keys)), encoding="utf-8")

    status = main(["explain", "speed", str(tmp_path)])

    assert status == 4
    assert words in capsys.readouterr().err


def test_a_report_without_speed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps(_raw({})), encoding="utf-8")

    assert main(["explain", "speed", str(tmp_path)]) == 4
    assert "the report holds no speed-up" in capsys.readouterr().err
