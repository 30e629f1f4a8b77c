"""A reader that leaves, workers that repeat one another, a user without a home: a status and a line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _command(folder: Path, *options: str) -> list[str]:
    python = [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", "--contract", "AMP-API-001"]
    return [*python, "--device", "cpu", "--report", str(folder / "report"), *options]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("processes", ["0", "2"])
def test_reader_that_closes_the_pipe(root: Path, tmp_path: Path, processes: str, unbuffered: str) -> None:
    command = _command(tmp_path, "-n", processes)
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    run = subprocess.Popen(command, cwd=root, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stderr is not None

    run.stdout.close()

    assert (run.wait(), run.stderr.read()) == (2, "")


def test_distribution_to_each_worker(root: Path, tmp_path: Path) -> None:
    command = _command(tmp_path, "-n", "2", "--dist", "each")
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert run.returncode == 4
    assert "--dist each runs every case in every worker" in run.stderr


_NOBODY = """
import os, pwd, socket

def unknown(number):
    raise KeyError(number)

pwd.getpwuid, socket.gethostname = unknown, lambda: "a-machine"
from conformance.harness import environment
print(environment.redact("on a-machine"))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="without a table of users")
def test_user_without_a_name_and_a_home(root: Path) -> None:
    """As in a container that is run under a number: the report hides the machine's name all the same."""
    known = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    variables = {key: value for key, value in os.environ.items() if key not in known}
    command = [sys.executable, "-c", _NOBODY]
    run = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (0, "")
    assert "a-machine" not in run.stdout
