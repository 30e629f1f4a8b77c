"""The kill matrix: what a child says of a fault, the file that a campaign resumes, and the page."""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from conformance.harness import catalogue
from tests.faults import Fault, load
from tests.faults.campaigns import children, kill_matrix, kill_page, pytorch_tests
from tests.faults.campaigns.children import in_child, in_turn
from tests.faults.campaigns.kill_matrix import Row

_EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"


def _row(fault: str, *killers: str, scope: str = "chapter", note: str = "") -> Row:
    return Row(fault, "scale", "quick", scope, "warm", 10, 1.5, " ".join(killers), note)


def test_a_child_says_what_it_found() -> None:
    assert in_child(lambda: ["AMP-B-001", "AMP-A-001"]) == (frozenset({"AMP-A-001", "AMP-B-001"}), "")


def test_a_child_that_raises_dies_or_hangs_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> list[str]:
        raise LookupError("no such thing")

    def hangs() -> list[str]:
        time.sleep(60)
        return []

    assert in_child(raises) == (frozenset(), "LookupError: no such thing")
    assert in_child(lambda: os._exit(9)) == (frozenset(), "the process died")
    monkeypatch.setattr(children, "LIMIT", 0.2)  # a child of a busy machine may take as long to die
    assert in_child(hangs) == (frozenset(), "hangs for 0.2 s")


def test_a_file_is_resumed_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "matrix.csv"
    rows = [_row("one", "AMP-SCALE-001", "AMP-SCALE-002"), _row("two", note="hangs, it seems")]
    for row in rows:
        kill_matrix.append(path, row)
    with path.open("a") as stream:
        stream.write("three,scale,quick")

    assert kill_matrix.read(path) == rows


def test_the_row_of_a_whole_chapter_takes_the_place_of_that_of_the_named_contracts(tmp_path: Path) -> None:
    path = tmp_path / "matrix.csv"
    named, whole = _row("one", "AMP-SCALE-001", scope="named"), _row("one", "AMP-SCALE-001", "AMP-SCALE-002")
    for row in (named, _row("two"), whole):
        kill_matrix.append(path, row)

    assert kill_matrix.read(path) == [whole, _row("two")]


def test_what_kills_alone_is_said_of_whole_chapters_only() -> None:
    rows = [_row("one", "AMP-SCALE-001", scope="named"), _row("two", "AMP-SCALE-001", "AMP-SCALE-010")]
    faults = {row.fault: Fault(row.fault, "", ("AMP-SCALE-011",), lambda: iter(())) for row in rows}

    page = kill_page.page(rows, faults)
    alone, beside, nothing = page.split("\n## ")[1:4]

    assert "Measured: 2 of 2 faults (100%)**, 1 of them with all contracts of their chapters" in page
    assert "AMP-SCALE-001" not in alone
    assert "AMP-SCALE-001 " in beside
    assert "AMP-SCALE-011 " in nothing
    assert "AMP-SCALE-001 " not in nothing


def test_every_chapter_has_its_share_of_any_beginning() -> None:
    faults = load()
    first = in_turn(faults.values())[: len(faults) // 4]

    assert len(set(in_turn(faults.values()))) == len(faults)
    for chapter in {fault.chapters[0] for fault in faults.values()}:
        share = sum(fault.chapters[0] == chapter for fault in first) / len(first)
        whole = sum(fault.chapters[0] == chapter for fault in faults.values()) / len(faults)
        assert abs(share - whole) < 0.02


def test_the_page_names_what_kills_alone_beside_others_and_nothing() -> None:
    rows = [_row("one", "AMP-SCALE-001"), _row("two", "AMP-SCALE-001", "AMP-SCALE-010"), _row("three")]
    faults = {row.fault: Fault(row.fault, "", ("AMP-SCALE-011",), lambda: iter(())) for row in rows}
    theirs = [{"fault": "three", "tests": "40", "seconds": "2.0", "failed": "test_one", "note": ""}]

    page = kill_page.page(rows, faults, theirs)
    alone, beside, nothing = page.split("\n## ")[1:4]

    assert "Measured: 3 of 3 faults (100%)" in page
    assert "Not killed here, 1 of 3:\n\n- `three` (AMP-SCALE-011): no failure" in page
    assert "AMP-SCALE-001 " in alone
    assert "`one`" in alone
    assert "AMP-SCALE-010 " in beside
    assert "AMP-SCALE-001 (1)" in beside
    assert "AMP-SCALE-011 " in nothing
    assert "AMP-SCALE-001 " not in nothing
    assert "PyTorch kills what this suite does not: `three`." in page


def test_the_data_can_be_read_and_have_a_line_for_each_fault() -> None:
    rows = kill_matrix.read(_EVIDENCE / "kill-matrix.csv")
    theirs = pytorch_tests.read(_EVIDENCE / "kill-matrix-pytorch.csv")

    assert rows
    assert theirs
    assert len({row.fault for row in rows}) == len(rows)
    assert len({row["fault"] for row in theirs}) == len(theirs)


def _naming() -> dict[str, list[str]]:
    """Return the faults that name each `must` contract."""
    musts = [contract.id for contract in catalogue.load().contracts.values() if contract.level == "must"]
    by_pattern: dict[str, list[str]] = {}
    for fault in load().values():
        for pattern in fault.contracts:
            by_pattern.setdefault(pattern, []).append(fault.name)
    return {
        id: [name for pattern, names in by_pattern.items() if fnmatchcase(id, pattern) for name in names]
        for id in musts
    }


def test_every_must_contract_is_named_by_a_fault_or_has_a_reason() -> None:
    assert [id for id, names in _naming().items() if not names] == list(kill_page.without_a_fault())


def test_every_must_contract_kills_one_of_the_faults_that_name_it() -> None:
    """A fault that names several need not be caught by each; of one that is not measured yet nothing is known."""
    killers = {row.fault: row.killers.split() for row in kill_matrix.read(_EVIDENCE / "kill-matrix.csv")}

    assert [
        id
        for id, names in _naming().items()
        if names and all(name in killers and id not in killers[name] for name in names)
    ] == []
