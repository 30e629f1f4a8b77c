"""The command line over reports: what it prints, its exit status, and that it needs neither torch nor pytest."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import reports
from tests.commands.running import exit_status
from tests.paths import ROOT

# Put on the path as sitecustomize, so that the interpreter itself refuses what a laptop without torch lacks.
_BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "pytest", "_pytest", "numpy", "hypothesis", "packaging"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


def _path(name: str) -> str:
    return str(reports.path(name))


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("conformant", "conformant", 0),
        ("conformant", "failing", 1),
        ("conformant", "improved", 1),
        ("failing", "conformant", 0),
        ("conformant", "incomplete", 2),
        ("incomplete", "conformant", 2),
        ("interrupted", "interrupted", 2),
        ("nothing", "nothing", 0),
    ],
)
def test_diff(old: str, new: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("diff", _path(old), _path(new)) == status

    out, err = capsys.readouterr()
    assert out.startswith("INCOMPLETE: " if status == 2 else f"old: {_path(old)}, ")
    assert out.splitlines()[-1].startswith({0: "NO REGRESSION: ", 1: "REGRESSION: ", 2: f"new: {_path(new)}, "}[status])
    assert err == ""


@pytest.mark.parametrize("name", reports.NAMES)
def test_summary_ends_with_the_verdict_and_the_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = name not in ("incomplete", "interrupted")

    assert exit_status("summary", _path(name)) == (0 if ended else 2)

    out = capsys.readouterr().out
    assert out.startswith("INCOMPLETE: ") is not ended
    assert out.splitlines()[-1] == f"report: {_path(name)}"
    assert "\x1b" not in out


def test_quiet_summary_is_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    exit_status("summary", _path("failing"))
    whole = capsys.readouterr().out
    exit_status("summary", "-q", _path("failing"))

    assert len(capsys.readouterr().out.splitlines()) < len(whole.splitlines()) / 2


@pytest.mark.parametrize("name", reports.NAMES)
def test_checklist_is_the_same_on_standard_output_and_in_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "checklist.md"

    assert exit_status("checklist", _path(name)) == 0
    assert exit_status("checklist", _path(name), "-o", str(file)) == 0

    page = file.read_text(encoding="utf-8")
    assert capsys.readouterr().out == page
    assert hashlib.sha256(reports.path(name).read_bytes()).hexdigest() in page


def test_folder_stands_for_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(_path("conformant"), tmp_path / "report.json")

    assert exit_status("summary", str(tmp_path)) == 0
    assert exit_status("checklist", str(tmp_path)) == 0
    assert exit_status("diff", str(tmp_path), str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["summary", "absent.json"], "conformance summary: absent.json: there is no such file"),
        (["summary", "."], "conformance summary: report.json: there is no such file"),
        (["summary", "text.txt"], "conformance summary: text.txt: not a JSON document"),
        (["checklist", "text.txt"], "conformance checklist: text.txt: not a JSON document"),
        (["diff", "good.json", "absent.json"], "conformance diff: absent.json: there is no such file"),
        (["diff", "absent.json", "good.json"], "conformance diff: absent.json: there is no such file"),
        (["checklist", "good.json", "-o", "good.json"], "--output good.json is the report itself"),
        (
            ["checklist", "good.json", "-o", "no/such/folder.md"],
            "--output no/such/folder.md cannot be written: No such",
        ),
        (["checklist", "good.json", "-o", "."], "--output . cannot be written: Is a directory"),
        (["summary", "two\nlines.json"], "conformance summary: two lines.json: there is no such file"),
        (["verify", "text.txt"], "conformance verify: text.txt: not a JSON document"),
        (["verify", os.devnull], f"conformance verify: {os.devnull}: not a regular file"),
        (["verify", "text.txt/report.json"], "conformance verify: text.txt/report.json: there is no such file"),
        (["verify", "x" * 300], "cannot be read: File name too long"),
        (["checklist", "good.json", "-o", "x" * 300], "cannot be written: File name too long"),
        (["catalogue", "--check", "x" * 300], "cannot be read: File name too long"),
        (["catalogue", "--check", os.devnull], f"--check {os.devnull} is not a regular file"),
        (["catalogue", "--check", "."], "--check . is not a regular file"),
    ],
)
def test_bad_input_gets_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(_path("conformant"), "good.json")
    Path("text.txt").write_text("no report", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert exit_status(*words) == 4

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("words", [[], ["diff"], ["diff", "one"], ["merge"], ["summary", "a", "--level", "x"]])
def test_wrong_command_line_ends_with_4(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(*words) == 4

    assert "usage: python -m conformance" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--help") == 0
    assert "diff" in capsys.readouterr().out
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("amp-conformance ")


def _without_torch(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(_BLOCKER, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_blocker_blocks(tmp_path: Path) -> None:
    for name in ("torch", "pytest"):
        assert f"{name} is blocked" in _without_torch(tmp_path, "-c", f"import {name}").stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["diff", _path("conformant"), _path("failing")], 1),
        (["checklist", _path("failing")], 0),
        (["summary", _path("failing")], 0),
        (["cases", _path("failing")], 0),
        (["summary", "absent.json"], 4),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_commands_need_neither_torch_nor_pytest(words: list[str], status: int, tmp_path: Path) -> None:
    run = _without_torch(tmp_path, "-m", "conformance", *words)

    assert run.returncode == status, run.stderr
    assert "Traceback" not in run.stderr
    assert bool(run.stdout) is (status != 4)


def test_output_that_cannot_show_every_character(tmp_path: Path) -> None:
    whole = reports.path("conformant").read_text(encoding="utf-8").replace("Losses are", "Verluste \u00e4 \u20ac are")
    file = tmp_path / "report.json"
    file.write_text(whole, encoding="utf-8")

    run = _without_torch(tmp_path, "-m", "conformance", "checklist", "--annex", str(file), PYTHONIOENCODING="ascii")

    assert run.returncode == 0, run.stderr
    assert "Verluste ? ? are" in run.stdout


def test_reader_that_hangs_up_early_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BLOCKER, encoding="utf-8")
    writer = subprocess.Popen(
        [sys.executable, "-m", "conformance", "checklist", _path("failing")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    complaint = writer.stderr.read().decode()
    writer.stderr.close()

    assert writer.wait(timeout=60) == 0
    assert complaint == ""


def test_catalogue_page_is_written_and_held_against_the_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "contracts.md"

    assert exit_status("catalogue", "-o", str(page)) == 0
    assert exit_status("catalogue", "--check", str(page)) == 0
    page.write_text(page.read_text().replace("AMP-SCALE-001", "AMP-SCALE-999"))
    assert exit_status("catalogue", "--check", str(page)) == 1

    assert "is out of date" in capsys.readouterr().err


def test_catalogue_page_of_the_docs_is_up_to_date() -> None:
    assert exit_status("catalogue", "--check", str(ROOT / "docs" / "contracts.md")) == 0


def test_file_that_is_no_text_is_a_catalogue_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_bytes(b"\xff\x00")

    assert exit_status("catalogue", "--check", str(tmp_path / "page.md")) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["report.json", ""])
def test_folder_that_is_locked_gets_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(_path("conformant"), tmp_path / "report.json")
    real = os.stat

    def locked(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("report.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    # Permission bits do not bind root, as whom tests may run.
    monkeypatch.setattr(os, "stat", locked)

    assert exit_status("summary", str(tmp_path / name)) == 4
    assert "report.json: cannot be read: Permission denied" in capsys.readouterr().err


def test_catalogue_page_that_is_missing_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("catalogue", "--check", str(tmp_path / "none.md")) == 4

    assert capsys.readouterr().err.count("\n") == 1
