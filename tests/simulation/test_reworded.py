"""Tests that the suite judges a torch that words its errors and warnings differently as it judges the original."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.faults.campaigns.campaign import WITHOUT_COLLECTIONS
from tests.paths import ROOT
from tests.simulation.reworded import reworded


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            "expected `device_type` of type `str`, got: `<class 'int'>`",
            "so `device_type` so so `str`, so: `<class 'int'>`",
        ),
        ("CUDA is not available. Disabling autocast.", "CUDA so so so. so autocast."),
        ("unscale_() is being called after step().", "unscale_() so so so so step()."),
        ("only supports torch.bfloat16, float16 currently", "so so torch.bfloat16, float16 so"),
    ],
)
def test_names_stay(message: str, kept: str) -> None:
    assert reworded(message) == kept
    assert reworded(kept) == kept


_SHOWN = """
from tests.simulation import reworded

reworded.pytest_load_initial_conftests()
import torch

try:
    torch.amp.GradScaler("cpu").step(None, closure=print)
except RuntimeError as error:
    print(error)
"""


def test_torch_is_reworded() -> None:
    shown = subprocess.run([sys.executable, "-c", _SHOWN], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "so so so" in shown.stdout
    assert "GradScaler" in shown.stdout
    assert "supported" not in shown.stdout


# The chapters whose contracts are about errors and warnings.
@pytest.mark.parametrize("chapters", [("api", "region"), ("clip", "scale"), ("backward", "optimizer")], ids="-".join)
def test_other_words_break_no_promise(chapters: tuple[str, ...], tmp_path: str) -> None:
    options = [option for chapter in chapters for option in ("--chapter", chapter)]
    command = [sys.executable, "-m", "pytest", "conformance", "-p", "tests.simulation.reworded", "--level", "quick"]
    command += [*options, "-n", "0", "-q", f"--report={tmp_path}", *WITHOUT_COLLECTIONS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:]
    assert not re.search(r"^(FAIL|ERROR) ", run.stdout, re.MULTILINE)
