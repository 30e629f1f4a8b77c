"""The page of bounds: every bounded check is measured and none is a false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.oracles.numbers.formats import FP16
from tests.generators.bound_ratios import BOUNDS, SOURCES, checks, main


def test_page(tmp_path: Path) -> None:
    page = tmp_path / "bounds.md"
    assert main(["--seeds", "2", "-o", str(page), "--only", "mm"]) == 0
    text = page.read_text()
    assert "false alarms: 0" in text
    assert "| addmm " in text


@pytest.mark.parametrize("family", SOURCES)
def test_every_family_is_measured(family: str) -> None:
    found = [check for check in checks(FP16) if check.family == family]
    assert found
    assert all(check.bound in BOUNDS.values() and check.runs for check in found)
