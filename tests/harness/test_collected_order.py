"""Processes of one run collect the same cases in the same order, whatever the hashes of their names are."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.paths import ROOT


def _collected(seed: str) -> list[str]:
    options = ["--collect-only", "-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", "--level", "full"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "conformance", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in run.stdout.splitlines() if "::" in line]


def test_the_order_does_not_depend_on_hashes() -> None:
    first, second = _collected("1"), _collected("2")

    assert len(first) > 1000
    assert first == second
