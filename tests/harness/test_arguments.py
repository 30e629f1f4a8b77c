"""Arguments of pytest that name a check which is not there are refused in one line; a report leaves no unclean tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness import environment
from tests import reports


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("conformance/chapters/scale/test_scale.py::nope", "there is no check 'nope' in"),
        ("conformance/chapters/scale/test_scale.py::test_nope[cpu]", "there is no check 'test_nope' in"),
    ],
)
def test_unknown_check_is_one_line(root: Path, tmp_path: Path, argument: str, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", argument, "--report", str(tmp_path / "report"), "-p", "no:cacheprovider"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 4
    assert f"ERROR: {argument}: {said}" in run.stderr + run.stdout
    assert len((run.stdout + run.stderr).strip().splitlines()) == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("made", "clean"),
    [
        ({}, True),
        ({"old/report.json": "report", "old/summary.txt": "CONFORMANT"}, True),
        ({"out/new/report.json": "report", "out/new/junit.xml": ""}, True),
        ({"old/report.json": "{}"}, False),
        ({"notes.txt": "mine"}, False),
        ({"conformance/chapters/x.py": ""}, False),
        ({"kept.txt": "changed"}, False),
    ],
)
def test_folders_of_reports_leave_the_checkout_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, str], clean: bool
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "kept.txt").write_text("kept")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    for name, words in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        whole = '{"schema":"' + reports.sample("conformant").schema + '",'
        (tmp_path / name).write_text(whole if words == "report" else words)

    assert environment.suite().clean is clean
