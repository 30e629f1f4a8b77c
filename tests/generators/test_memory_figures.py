"""The page on the memory of a step: every row says the same on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generators.memory_figures import ARMS, WORKLOADS, page, peaks, points


def test_what_is_predicted_is_observed() -> None:
    rows = list(points())
    assert len(rows) == len(WORKLOADS) * len(ARMS)
    for name, arm, *pairs in rows:
        assert [pair.split(" / ")[0] for pair in pairs] == [pair.split(" / ")[1] for pair in pairs], (name, arm)


def test_every_peak_lies_within_its_bounds() -> None:
    for name, arm, low, seen, high, _ in peaks():
        numbers = [int(number.replace(",", "")) for number in (low, seen, high)]
        assert numbers == sorted(numbers), (name, arm)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_page_that_is_kept_has_every_workload(root: Path, name: str) -> None:
    assert f"| {name} " in (root / "docs" / "evidence" / "memory.md").read_text(encoding="utf-8")


def test_the_page_names_the_published_case() -> None:
    assert "98,589,696 more" in page()
