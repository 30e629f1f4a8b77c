"""Test that the campaign of clean runs notices a verdict that changes, and that its page is of its data."""

from __future__ import annotations

from pathlib import Path

from tests.generators import clean_runs
from tests.paths import ROOT

DATA = ROOT / "docs" / "evidence" / "clean-runs.csv"


def test_a_changed_verdict_is_named(tmp_path: Path) -> None:
    known = tmp_path / "2.13.0.json.gz"
    assert clean_runs.compare(known, {"a": "PASS", "b": "PASS"}) == []
    assert clean_runs.compare(known, {"b": "FAIL", "c": "PASS"}) == ["b"]
    assert clean_runs.compare(known, {"b": "PASS", "c": "PASS"}) == []
    assert clean_runs.compare(known, {"d": "FAIL"}) == ["d"]
    assert clean_runs.compare(known, {"a": "WAIVED", "c": "UNSUPPORTED"}) == ["c"]


def test_runs_survive_a_file(tmp_path: Path) -> None:
    one = clean_runs.Run(
        3, "2.13.0+cpu", "standard", 7, "auto", "all", True, 1.5, 40.0, 1, 6400, "AMP-X-001[a] AMP-X-001[b]"
    )
    clean_runs.save(tmp_path / "runs.csv", [one])
    assert clean_runs.load(tmp_path / "runs.csv") == [one]
    assert "0 of 1 runs are clean" in clean_runs.page([one])
    assert one.changed in clean_runs.page([one])


def test_the_page_is_of_the_data() -> None:
    written = (ROOT / "docs" / "evidence" / "clean-runs.md").read_text(encoding="utf-8")
    assert written == clean_runs.page(clean_runs.load(DATA))
