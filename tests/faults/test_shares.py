"""Each fault is in one share of them, and a share that is none is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import load
from tests.paths import ROOT


def _collected(share: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "pytest", "tests/faults/test_faults.py", "-n", "0", "--collect-only", "-q", "--faults", share)
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_fault_is_in_one_share() -> None:
    listed = [_collected(f"{k}/2").stdout.splitlines() for k in (1, 2)]

    names = [line.partition("[")[2].rstrip("]") for lines in listed for line in lines if "[" in line]
    assert sorted(names) == sorted(load())
    assert all(any("test_unbroken_torch_is_green" in line for line in lines) for lines in listed)


@pytest.mark.parametrize("share", ["5/4", "a/b"])
def test_what_is_no_share_is_refused(share: str) -> None:
    refused = _collected(share)

    assert refused.returncode == 4
    assert "is not K/N with 1 <= K <= N" in refused.stderr
