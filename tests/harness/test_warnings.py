"""Warnings stay warnings, whatever -W or the filterwarnings of a project turn them into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import Toy


def test_warning_in_a_case_does_not_raise(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "import warnings\n"
        "@contract('AMP-API-001')\n"
        "def test_a(case: Case) -> None:\n"
        "    warnings.warn('deprecated', FutureWarning)\n"
        "    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run("-W", "error::FutureWarning")

    assert outcome.verdicts() == {"AMP-API-001[a]": "PASS"}
    assert "deprecated" in outcome.output


def test_run_warns_of_nothing(tmp_path: Path, root: Path) -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "no:randomly")
    asked = ("--contract", "AMP-API-001", "-n", "0", "--report", str(tmp_path / "report"))

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "conformance", *plugins, *asked],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
