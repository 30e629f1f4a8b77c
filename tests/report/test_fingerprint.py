"""A fingerprint in a report: shown as a table and in a line, compared, signed for, and refused where it is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conformance.__main__ import main
from conformance.harness.check import Case
from conformance.report import checklist, comparison, diff, document, fingerprint, terminal
from conformance.report.encode import encode
from conformance.report.values import Report
from tests import reports
from tests.harness.test_case import _CONTRACT
from tests.paths import ROOT

SCHEMA = json.loads((ROOT / "conformance" / "report" / "schema.json").read_text(encoding="utf-8"))
SECTIONS = {
    "fp16": {"accumulator": "fp32, to nearest even", "partial sums": "fp16, to nearest even"},
    "bf16": {"accumulator": "fp32, to nearest even", "subnormal operands": "flushed", "result": "to nearest even"},
    "fp32": {"accumulator": "fp32, to nearest even"},
    "machine": {"libraries": "MKL 2024.2"},
}


def _raw(sections: Any = SECTIONS, **changed: Any) -> dict[str, Any]:
    """The sample of a conformant run, one case of which holds the fingerprint."""
    raw = reports.raw("conformant")
    case = next(case for case in raw["cases"] if case["target"] == "cpu")
    case["evidence"] += [
        {
            "name": name,
            "measured": [[row, value] for row, value in rows.items()],
            "relation": None,
            "bound": None,
            "unit": fingerprint.UNIT,
            "holds": True,
            **changed,
        }
        for name, rows in sections.items()
    ]
    return raw


def _report(sections: Any = SECTIONS) -> Report:
    return document.parse(_raw(sections))


def _truncating() -> dict[str, dict[str, str]]:
    return SECTIONS | {"fp16": {**SECTIONS["fp16"], "accumulator": "fp32, toward zero"}}


def _write(path: Path, raw: dict[str, Any]) -> str:
    path.write_text(json.dumps(raw), encoding="utf-8")
    return str(path)


def test_what_a_case_records_is_read_back_and_fits_the_schema() -> None:
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={})
    case.fingerprint(SECTIONS)
    raw = _raw({})
    holder = next(case for case in raw["cases"] if case["target"] == "cpu")
    holder["evidence"] += [encode(evidence) for evidence in case.evidence]

    jsonschema.Draft202012Validator(SCHEMA).validate(raw)
    (found,) = fingerprint.fingerprints(document.parse(raw)).values()
    assert found == fingerprint.Fingerprint("cpu", SECTIONS)


@pytest.mark.parametrize("measured", ["a text", [["row"]], [["row", 1]], [1, 2], [["row", "value", "more"]], None])
def test_what_is_no_fingerprint_is_refused(measured: Any) -> None:
    raw = _raw({"fp16": {}}, measured=measured)

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(raw)
    with pytest.raises(document.WrongTypes, match="'fp16' is no section of a fingerprint: not pairs of texts"):
        fingerprint.fingerprints(document.parse(raw))


def test_table_has_a_column_for_each_dtype_and_the_machine_below() -> None:
    (found,) = fingerprint.fingerprints(_report()).values()
    shown = fingerprint.render(found, width=100)

    assert shown.startswith("Numerics fingerprint of cpu\n---------------------------\n")
    assert ["fp16", "bf16", "fp32"] in [row.split() for row in shown.splitlines()]
    assert shown.endswith("\n\nlibraries: MKL 2024.2")
    assert max(map(len, shown.splitlines())) <= 100


def test_summary_has_a_line_of_what_matters() -> None:
    shown = terminal.render(_report(), short=False, width=200, report_path="report.json")

    assert (
        "\nnumerics of cpu: fp16 sums in fp32, to nearest even, partial sums fp16, to nearest even; "
        "bf16 sums in fp32, to nearest even, subnormals flushed; fp32 sums in fp32, to nearest even\n" in shown
    )
    assert "numerics of" not in terminal.render(
        reports.sample("conformant"), short=False, width=200, report_path="report.json"
    )


def test_checklist_has_the_whole_table_once() -> None:
    page = checklist.render(_report(), with_annex=True)

    assert "**Numerics fingerprint of cpu,** as measured:" in page
    assert "| bf16 | subnormal operands | flushed |" in page
    assert page.count("MKL 2024.2") == 1


def _compared(old: Report, new: Report) -> str:
    return diff.render(old, new, comparison.compare(old, new), names=("old", "new"), width=100)


def test_another_version_of_a_library_is_environment_and_no_arithmetic() -> None:
    machine = {**SECTIONS["machine"], "libraries": "MKL 2025.1"}

    shown = _compared(_report(), _report({**SECTIONS, "machine": machine}))

    assert "Environment: what differs\n" in shown
    assert "libraries: MKL 2024.2 -> MKL 2025.1" in shown
    assert "fingerprint" not in shown
    assert "arithmetic" not in shown


def test_comparison_tells_what_changed() -> None:
    shown = _compared(_report(), _report(_truncating()))

    assert "Numerics fingerprint: what differs (1 row)\n" in shown
    assert "\n  fp16 accumulator: fp32, to nearest even -> fp32, toward zero\n" in shown
    assert shown.endswith("has the same verdict. The arithmetic differs in 1 row, above.")


@pytest.mark.parametrize(("old", "new"), [({}, SECTIONS), (SECTIONS, {}), (SECTIONS, SECTIONS)])
def test_nothing_is_said_where_there_is_nothing_to_compare(old: Any, new: Any) -> None:
    assert "fingerprint" not in _compared(_report(old), _report(new))


def test_rows_that_only_one_has_are_not_measured_in_the_other() -> None:
    fewer = {name: rows for name, rows in SECTIONS.items() if name != "bf16"}
    found = [str(row) for row in fingerprint.differences(_report(), _report(fewer))]

    assert found[0] == "bf16 accumulator: fp32, to nearest even -> not measured"


def test_command_shows_what_a_report_holds_without_torch(tmp_path: Path) -> None:
    path = _write(tmp_path / "report.json", _raw())
    script = (
        "import sys; sys.modules['torch'] = None; from conformance.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "fingerprint", path], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    assert "Numerics fingerprint of cpu" in run.stdout


def test_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fingerprint", _write(tmp_path / "report.json", _raw()), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {"cpu": SECTIONS}


def test_command_measures_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fingerprint", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)["cpu"]
    assert list(found) == ["fp16", "bf16", "fp32", "machine"]
    assert found["fp32"]["operands"] == "24 bits (fp32)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "fake:cuda"], "fake:cuda computes nothing; name a real device"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["none.json"], "none.json: there is no such file"),
        ([str(reports.path("conformant"))], "the report holds no fingerprint (chapter numerics records it)"),
        ([str(reports.path("conformant")), "--device", "cpu"], "--device is for measuring"),
    ],
)
def test_command_refuses_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fingerprint", *words]) == 4

    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("conformance fingerprint: ")
    assert err.count("\n") == 1


def test_texts_of_a_fingerprint_cannot_control_the_terminal() -> None:
    report = _report({"fp16": {"accumulator\x1b[2J": "fp32\nREGRESSION\x07"}})
    (found,) = fingerprint.fingerprints(report).values()
    other = _report({"fp16": {"accumulator": "\x1b[31m"}})

    for shown in (
        fingerprint.render(found),
        fingerprint.brief(found),
        _compared(report, other),
        checklist.render(report),
    ):
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\nREGRESSION" not in shown
