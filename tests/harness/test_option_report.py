"""--report names the folder; the document in it can be read at any moment and says nothing private."""

from __future__ import annotations

import errno
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from conformance.harness.recorder import Recorder, ReportInUse
from conformance.report import document
from tests import reports
from tests.conftest import Toy
from tests.paths import ROOT

_WHOLE = {"schema": document.SCHEMA, "header": {"started": "now"}, "checks": [], "footer": {"overall": "CONFORMANT"}}
HEADER = reports.sample("conformant").header
_HOLDS = (
    "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.at_most('x', float('inf'), float('inf'))\n"
)


@pytest.fixture(scope="session")
def schema(root: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads((root / "conformance" / "report" / "schema.json").read_text())
    return read


def _suite(toy: Toy, body: str = _HOLDS) -> None:
    toy.contract("AMP-API-001")
    toy.checks(body)


def test_real_report_fits_its_schema_and_its_reader(toy: Toy, schema: dict[str, object]) -> None:
    _suite(toy, _HOLDS + "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    case.equal('y', [1], 2)\n")

    toy.run()

    jsonschema.validate(json.loads((toy.path / "report" / "report.json").read_text()), schema)
    read = document.read(toy.path / "report" / "report.json")
    assert read.footer is not None
    assert read.footer.overall.value == "NOT CONFORMANT"
    assert (toy.path / "report" / "summary.txt").read_text().strip()


def test_document_is_whole_after_every_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER)
    seen = [json.loads(recorder.path.read_text())]
    for number in range(3):
        recorder.add({"id": f"case {number}"})
        seen.append(json.loads(recorder.path.read_text()))
    recorder.finish(_WHOLE)

    assert [len(document["cases"]) for document in seen] == [0, 1, 2, 3]
    assert all(document["footer"] is None for document in seen)
    assert json.loads(recorder.path.read_text()) == _WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_report_that_cannot_be_finished_keeps_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **_: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    recorder = Recorder(tmp_path, HEADER)
    recorder.add({"id": "case"})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        recorder.finish(_WHOLE)

    left = json.loads((tmp_path / "report.json").read_text())
    assert (left["cases"], left["footer"]) == ([{"id": "case"}], None)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_two_runs_cannot_write_one_report(tmp_path: Path) -> None:
    first = Recorder(tmp_path, HEADER)
    with pytest.raises(ReportInUse):
        Recorder(tmp_path, HEADER)
    first.finish(_WHOLE)

    Recorder(tmp_path, HEADER).close()


def test_default_folders_of_two_runs_differ(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    _suite(toy)
    monkeypatch.chdir(toy.path)

    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", _MAIN, str(toy.path)], check=True, capture_output=True, env=_environment()
        )

    assert len(list((toy.path / "conformance-reports").glob("*/report.json"))) == 2


# Runs the toy suite of a folder in a process of its own.
_MAIN = """
import signal, sys, pathlib
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
from conformance.harness import catalogue, waivers
catalogue.FOLDER = pathlib.Path(sys.argv[1]) / "chapters"
waivers.shipped = lambda known: ()
import pytest
sys.exit(pytest.main(["-p", "conformance.harness.plugin", "-p", "no:randomly", *sys.argv[2:]]))
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_run_keeps_its_records_and_says_incomplete(toy: Toy, number: signal.Signals) -> None:
    _suite(
        toy,
        "import os, time\n" + _HOLDS + "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n"
        f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(30)\n",
    )

    run = subprocess.run(
        [sys.executable, "-c", _MAIN, str(toy.path), "--report", "report"],
        cwd=toy.path,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    report = document.read(toy.path / "report" / "report.json")
    assert run.returncode == 2
    assert [case.id for case in report.cases] == ["AMP-API-001[a]"]
    assert report.footer is not None
    assert report.footer.overall.value == "INCOMPLETE"
    assert "INCOMPLETE" in run.stdout


def test_killed_run_leaves_a_report_without_a_verdict(toy: Toy) -> None:
    _suite(
        toy,
        "import os\n" + _HOLDS + "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n"
        f"    os.kill(os.getpid(), {int(signal.SIGKILL)})\n",
    )

    subprocess.run(
        [sys.executable, "-c", _MAIN, str(toy.path), "--report", "report"],
        cwd=toy.path,
        env=_environment(),
        capture_output=True,
        check=False,
    )

    report = document.read(toy.path / "report" / "report.json")
    assert report.footer is None
    assert [case.id for case in report.cases] == ["AMP-API-001[a]"]


def test_report_names_no_host_user_or_folder(toy: Toy) -> None:
    places = f"{Path.home() / 'secret'} and {toy.path}"
    _suite(
        toy,
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n"
        f"    case.note('of {places}', [['at {places}']])\n    case.true('raised', True, 'by {places}')\n"
        f"    raise ValueError('in {places}')\n",
    )

    toy.run()

    text = (toy.path / "report" / "report.json").read_text()
    for private in (str(Path.home()), str(toy.path), socket.gethostname(), f"/{getpass.getuser()}/"):
        assert private not in text


@pytest.mark.parametrize("folder", ["taken", "taken/notes.txt/report"])
def test_folder_that_holds_something_else_is_refused(toy: Toy, folder: str) -> None:
    _suite(toy)
    (toy.path / "taken").mkdir()
    (toy.path / "taken" / "notes.txt").write_text("mine")

    outcome = toy.run(report=folder)

    assert outcome.status == 4
    assert "--report" in outcome.output
    assert [path.name for path in (toy.path / "taken").iterdir()] == ["notes.txt"]


def test_earlier_report_is_kept_beside_the_new_one_and_that_is_said(toy: Toy) -> None:
    _suite(toy)

    assert toy.run().status == 0
    first = (toy.path / "report" / "report.json").read_bytes()
    outcome = toy.run()

    assert outcome.status == 0
    assert "--report: report held a report, which is now report.previous.json" in outcome.output
    assert (toy.path / "report" / "report.previous.json").read_bytes() == first
    assert toy.run().status == 0


def test_folder_that_cannot_be_written_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    _suite(toy)

    outcome = toy.run(report="/proc/report")

    assert outcome.status == 4
    assert "cannot be written to" in outcome.output
