"""`python -m conformance explain scale`: the stories that it tells, its exit status, and reports that it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.check import Case
from conformance.report import document, excuses, explain, scale_history
from conformance.report.encode import encode
from conformance.report.scale_history import UNIT
from tests import reports
from tests.commands.running import exit_status
from tests.harness.test_case import _CONTRACT
from tests.paths import ROOT


def _evidence(scales: Any, name: str = "loss scale") -> dict[str, Any]:
    return {"name": name, "measured": scales, "relation": None, "bound": None, "unit": UNIT, "holds": True}


def _report(*scales: Any, name: str = "loss scale") -> dict[str, Any]:
    """The sample of a conformant run, whose cases hold these histories, one each."""
    raw = reports.raw("conformant")
    for case, one in zip(raw["cases"], scales, strict=False):
        case["evidence"].append(_evidence(one, name))
    return raw


def _told(scales: list[float]) -> str:
    story = explain.scale(document.parse(_report(scales)))
    assert story is not None
    return story


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a report that holds a history and with everything that does not, which is the current one."""
    monkeypatch.chdir(tmp_path)
    page = json.dumps(_report([64.0, 32.0, 32.0, 64.0], [1.0, 2.0]))
    Path("report.json").write_text(page, encoding="utf-8")
    Path("none.json").write_bytes(reports.path("conformant").read_bytes())
    Path("truncated.json").write_text(page[: len(page) // 2], encoding="utf-8")
    Path("list.json").write_text("[1, 2]", encoding="utf-8")
    for name, scales in _NO_HISTORIES.items():
        Path(f"{name}.json").write_text(json.dumps(_report(scales)), encoding="utf-8")
    Path("folder").mkdir()
    return tmp_path


_NO_HISTORIES: dict[str, Any] = {
    "number": 65536.0,
    "empty": [],
    "text": [65536.0, "large"],
    "nested": [65536.0, [1.0, 2.0]],
    "boolean": [True, False],
    "nothing": [None],
    "negative": [1.0, -2.0],
    "nan": [1.0, "nan"],
    "huge": [1.0, 10**400],
    "wide": [65536.0, 1e60],
}


def test_story(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("report.json", "."):
        assert exit_status("explain", "scale", path) == 0

        out, err = capsys.readouterr()
        assert out.splitlines()[0] == "2 loss scales in 1 contract"
        assert "loss scale: 3 iterations, 1 skipped, 2 ran, 1 growth" in out
        assert "began at 64, settled at 64, and was between 32 and 64 in the second half" in out
        assert "iteration 1 was skipped: the scale fell from 64 to 32" in out
        assert "iteration 2 ran: the scale stayed at 32" in out
        assert "iteration 3 ran: the scale grew from 32 to 64" in out
        assert "longest run without growth: 2 iterations (iterations 1 to 2)" in out
        assert err == ""


def test_contracts_narrow_the_story(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = _report([1.0, 2.0])
    raw["cases"][4]["evidence"].append(_evidence([4.0, 2.0]))
    Path("two.json").write_text(json.dumps(raw), encoding="utf-8")

    assert exit_status("explain", "scale", "two.json", "--contract", "AMP-SCALE-*") == 0

    out = capsys.readouterr().out
    assert out.startswith("1 loss scale in 1 contract (1 more in other contracts)\n\nAMP-SCALE-001 ")
    assert exit_status("explain", "scale", "two.json", "--contract", "AMP-CLIP-*") == 4
    assert "two.json: the report holds no history of a loss scale of AMP-CLIP-*" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no subject is given; there are: scale, snippet, speed, waivers (explain scale REPORT)"),
        (
            ["weather", "report.json"],
            "unknown subject 'weather'; there are: scale, snippet, speed, waivers (explain scale REPORT)",
        ),
        (["scale"], "no report is given (explain scale REPORT)"),
        (["scale", "absent.json"], "absent.json: there is no such file"),
        (["scale", "folder"], "folder/report.json: there is no such file"),
        (["scale", "truncated.json"], "truncated.json: not a JSON document"),
        (["scale", "list.json"], "list.json: not a report of this suite"),
        (["scale", "none.json"], "none.json: the report holds no history of a loss scale"),
        *((["scale", f"{name}.json"], f"{name}.json: the case AMP-LOSS-001[") for name in _NO_HISTORIES),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain", *words) == 4

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"conformance explain: {said}")
    assert err.count("\n") == 1


def test_too_many_words_end_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain", "scale", "a", "b") == 4

    assert "usage: python -m conformance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([65536.0], "No iteration was run"),
        ([65536.0] * 5, "The scale never moved: nothing overflowed in 4 iterations."),
        ([1.0, 2.0, 4.0], "The scale only grew: nothing overflowed, and it may not have found its level yet."),
        ([8.0, 4.0, 2.0, 2.0, 2.0, 2.0], "It began 4 times too large and took 2 iterations to fall. After that no"),
        ([8.0, 8.0, 4.0, 2.0, 1.0], "It was still falling at the end: the last 3 iterations were skipped."),
        ([2.0, 1.0, 0.5, 0.25], "It is below 1, where a gradient is inf or NaN whatever the scale is."),
        ([2.0, 2.0, 0.5, 0.5, 0.5], "The scale has fallen below 1"),
        ([2.0, 2.0, "inf", "inf"], "The scale was infinite"),
        ([8.0, 16.0, 8.0, 8.0, 8.0, 16.0], "1 iteration was skipped on the way, as the scale had grown a step too far"),
        ([8.0, 8.0, 4.0, 8.0, 4.0, 4.0], "2 iterations were skipped on the way, one in 2.5: more than"),
        ([8.0, 8.0, 8.0, 8.0, 4.0, 4.0], "1 iteration was skipped on the way, and the scale has not grown since."),
    ],
)
def test_sentence(scales: list[Any], said: str) -> None:
    assert said in " ".join(_told(scales).split())


def test_long_history_is_cut_in_its_middle() -> None:
    rows = _told([2.0**40, *([2.0**41, 2.0**40] * 50)]).splitlines()

    assert "    ... and so on, 88 times more ..." in rows
    assert len(rows) < 30
    assert "    iteration 100 was skipped: the scale fell from 2^41 to 2^40" in rows


def test_story_is_safe_to_show() -> None:
    story = explain.scale(document.parse(_report([1.0, 2.0], name="scale\x1b[31m\u202e of\nP4")))

    assert story is not None
    assert "\x1b" not in story
    assert "\u202e" not in story


@pytest.mark.parametrize(
    ("value", "said"),
    [(65536.0, "65536"), (2.0**17, "2^17"), (2.0**-3, "2^-3"), (3.0, "3"), (0.1, "0.1"), (0.0, "0"), (1.0, "1")],
)
def test_number(value: float, said: str) -> None:
    assert explain.number(value) == said


def test_history_of_a_case_is_read_back() -> None:
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={})
    case.history("loss scale", [2.0**16, 2.0**15, float("inf")])
    raw = reports.raw("conformant")
    raw["cases"][0]["evidence"] = [encode(case.evidence[0])]

    (history,) = scale_history.histories(document.parse(json.loads(json.dumps(raw))))

    assert history.scales == (2.0**16, 2.0**15, float("inf"))
    assert history.events == ("skipped", "grew")
    assert (history.iterations, history.count("skipped"), history.count("stayed")) == (2, 1, 0)


def test_explain_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys, runpy\n"
        "sys.modules.update(dict.fromkeys(('torch', 'pytest', 'hypothesis', 'packaging')))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "runpy.run_module('conformance', run_name='__main__')\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", script, "explain", "scale", "report.json"], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    assert "2 loss scales" in run.stdout


def test_waivers_are_told_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(reports.path("conformant"))

    assert exit_status("explain", "waivers", path) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("1 case waived: each fails, and a written excuse says so AMP-MEMORY-001 ")
    assert "seen bytes kept under autocast: 131072 B (required: at most 65536 B)" in shown
    assert "excuse On the CPU the input is kept in float32 as well, because" in shown
    assert "given by amp-conformance maintainers, until 2027-12-31" in shown
    assert "read on https://github.com/pytorch/pytorch" in shown
    assert exit_status("explain", "waivers", path, "--contract", "AMP-LOSS-*") == 4
    assert "the report holds no case that was waived of AMP-LOSS-*" in capsys.readouterr().err


def test_waivers_of_a_run_that_did_not_end_are_told_without_their_owner() -> None:
    raw = reports.raw("conformant")
    raw["footer"] = None
    story = excuses.render(document.parse(raw))

    assert story is not None
    assert "given by  not known: the run did not end" in story
    assert "read on" not in story


def test_explain_prints_the_program_of_a_failed_case(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = reports.raw("failing")
    failed = [case for case in raw["cases"] if case["verdict"] == "FAIL"]
    for number, case in enumerate(failed):
        case["snippet"] = f"import torch\n\nraise SystemExit({number})  # \x1b[31m{'long ' * 40}"
    Path("failing.json").write_text(json.dumps(raw), encoding="utf-8")

    for number, words in ((0, []), (1, ["--contract", failed[1]["contract"]]), (2, ["--contract", failed[2]["id"]])):
        assert exit_status("explain", "snippet", "failing.json", *words) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"import torch\n\nraise SystemExit({number})  # ?[31mlong long")
        assert len(out.splitlines()) == 3

    assert exit_status("explain", "snippet", "none.json") == 4
