"""Folders that torch cannot use are refused in one line: names that are no text, and a cache that cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def _run(root: Path, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "conformance", "-n", "0", "-p", "no:cacheprovider"),
            *("--contract", "AMP-API-001", "--device", "cpu", "--report", str(folder / "report")),
        ],
        cwd=root,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets the encoding of file names by the locale")
def test_temporary_folder_whose_name_the_locale_cannot_read(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()

    status, said = _run(root, tmp_path, {**_ASCII, "TMPDIR": str(folder)})

    assert status == 4
    assert "set PYTHONUTF8=1" in said
    assert "Traceback" not in said
    assert _run(root, tmp_path, {"PYTHONUTF8": "1", "TMPDIR": str(folder)})[0] == 0


def test_cache_folder_that_cannot_be_made(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    status, said = _run(root, tmp_path, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")})

    assert status == 4
    assert f"TORCHINDUCTOR_CACHE_DIR={tmp_path / 'file' / 'cache'} is no folder" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["here", "new/below"])
def test_cache_folder_that_is_there_or_can_be_made(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()

    status, said = _run(root, tmp_path, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)})

    assert status == 0, said
