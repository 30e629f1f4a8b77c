"""The page of departures by version: what ends and begins with a version is told, and the page is of the waivers."""

from __future__ import annotations

import datetime

from conformance.harness.waivers import Waiver
from tests.generators import departures


def _waiver(contract: str, torch: str) -> Waiver:
    return Waiver(contract, ("*",), f"What {contract} says.", "owner", "link", datetime.date.max, torch=torch)


def test_what_moved_is_told() -> None:
    mended, broken, lasting = _waiver("AMP-A-001", "<2.9"), _waiver("AMP-B-001", ">=2.9"), _waiver("AMP-B-002", ">=2.6")

    assert departures.moved([mended, broken, lasting], "2.8", "2.9") == ([mended], [broken])
    assert departures.moved([mended, broken, lasting], "2.9", "2.10") == ([], [])


def test_waivers_are_counted_by_version() -> None:
    waivers = [_waiver("AMP-A-001", "<2.9"), _waiver("AMP-B-001", ">=2.9"), _waiver("AMP-B-002", ">=2.6")]

    written = departures.page(waivers, lambda id: id[4].lower(), ["a", "b", "c"])

    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in written.splitlines() if line.startswith("|")}
    assert [int(cell) for cell in rows["a"]] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert [int(cell) for cell in rows["b"]] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert "c" not in rows
    assert "- AMP-A-001: What AMP-A-001 says. (link)" in written


def test_the_page_is_that_of_the_waivers() -> None:
    assert departures.PAGE.read_text(encoding="utf-8") == departures.current()
