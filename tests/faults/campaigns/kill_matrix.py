"""Contracts by faults: which contracts fail under each fault, and the page that questions the others.

`python -m tests.faults.campaigns.kill_matrix --resume docs/evidence/kill-matrix.csv --minutes 30` measures faults that
the file does not have yet, of all chapters in turn, and appends them; `--page FILE` writes the page from the file.
With `--scope named` the contracts that each fault names run, and those of its chapters that no fault names, a second or
two for each fault; a row of a whole chapter that is measured later takes the place of such a row.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

from conformance.harness.items import facts
from tests.faults import Fault, load
from tests.faults.campaigns import kill_page, pytorch_tests
from tests.faults.campaigns.campaign import CHECKS, PLAIN, run
from tests.faults.campaigns.children import in_child, in_turn, say


@dataclass(frozen=True)
class Row:
    """One fault: the contracts that failed under it and not without it, of those that ran."""

    fault: str
    chapters: str
    level: str
    scope: str
    """The contracts that ran: `chapter`, all of its chapters; `named`, those that it names and those that none does."""
    how: str
    """`warm`: checks imported before torch was broken; `fresh`: imported after, where `warm` saw nothing."""
    cases: int
    seconds: float
    killers: str
    note: str = ""


def read(path: Path) -> list[Row]:
    """Read the rows of a file, the last of each fault; one that was cut off in its last line is read up to there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        whole = [row for row in csv.DictReader(stream) if None not in row.values()]
    rows = [
        Row(
            row["fault"],
            row["chapters"],
            row["level"],
            row["scope"],
            row["how"],
            int(row["cases"]),
            float(row["seconds"]),
            row["killers"],
            row["note"],
        )
        for row in whole
    ]
    return list({row.fault: row for row in rows}.values())


def append(path: Path, row: Row) -> None:
    """Add a row at the end of the file."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


class Matrix:
    """A pytest plugin that collects the suite once and runs what a fault concerns in a child for each fault."""

    def __init__(self, faults: Sequence[Fault], scope: str, path: Path, ends: float) -> None:
        self._faults = faults
        self._scope = scope
        self._path = path
        self._ends = ends
        self._judged: set[str] = set()
        self._failing_unbroken: frozenset[str] = frozenset()
        self._patterns = {pattern for fault in load().values() for pattern in fault.contracts}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Take the place of pytest's loop."""
        self._items: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            if (found := facts(item)) is not None and not found.alone:
                self._items.setdefault(found.contract, []).append(item)
        for number, fault in enumerate(self._faults):
            if time.monotonic() > self._ends:
                break
            row = self._row(fault)
            append(self._path, row)
            say(f"{number + 1}/{len(self._faults)} {row.seconds:6.1f} s  {row.fault}: {row.killers or row.note or '-'}")
        return True

    def _concerned(self, fault: Fault) -> list[str]:
        chapters = {chapter.upper() for chapter in fault.chapters}
        near = [contract for contract in self._items if contract.split("-")[1] in chapters]
        if self._scope == "chapter":
            return near
        return [one for one in near if _matches(one, fault.contracts) or not _matches(one, self._patterns)]

    def _row(self, fault: Fault) -> Row:
        contracts = self._concerned(fault)
        cases = sum(len(self._items[contract]) for contract in contracts)
        self._judge_unbroken(contracts)
        begun = time.monotonic()
        # What needs more than this process, no contract sees in it.
        failed, note = (frozenset(), "") if fault.machine else in_child(lambda: self._failing(contracts, fault))
        killers, how = failed - self._failing_unbroken, "warm"
        if not _named(killers, fault):
            fresh, more = in_child(lambda: sorted(run(fault, chapters=None).failed))
            note = "; ".join(filter(None, (note, more)))
            if fresh:
                killers, how = killers | fresh, "fresh"
        seconds = round(time.monotonic() - begun, 1)
        found = " ".join(sorted(killers))
        return Row(fault.name, " ".join(fault.chapters), fault.level, self._scope, how, cases, seconds, found, note)

    def _judge_unbroken(self, contracts: Sequence[str]) -> None:
        """Note which of the contracts fail in such a child with nothing broken: they kill nothing."""
        new = [contract for contract in contracts if contract not in self._judged]
        failing, note = in_child(lambda: self._failing(new, None)) if new else (frozenset(), "")
        self._judged.update(new)
        self._failing_unbroken |= failing
        if failing or note:
            say(f"unbroken: {', '.join(sorted(failing))} {note}")

    def _failing(self, contracts: Sequence[str], fault: Fault | None) -> list[str]:
        with contextlib.nullcontext() if fault is None else fault.applied():
            return [contract for contract in contracts if any(map(_fails, self._items[contract]))]


def _fails(item: pytest.Item) -> bool:
    reports = runtestprotocol(item, log=False, nextitem=None)
    return any(getattr(report, "conformance", {}).get("verdict") == "FAIL" for report in reports)


def _named(killers: Iterable[str], fault: Fault) -> list[str]:
    return [one for one in killers if _matches(one, fault.contracts)]


def _matches(contract: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(contract, pattern) for pattern in patterns)


def measure(faults: Sequence[Fault], scope: str, path: Path, minutes: float) -> int:
    """Collect the suite at quick and measure faults until the time is over."""
    torch.set_num_threads(1)  # a child of a process whose threads have worked hangs
    matrix = Matrix(faults, scope, path, time.monotonic() + minutes * 60)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(CHECKS), "-q", *PLAIN, "-p", "no:randomly", "-n", "0", "--level", "quick", "--report", folder]
        with contextlib.redirect_stdout(io.StringIO()):  # of a run whose cases leave no record there
            return int(pytest.main(arguments, plugins=[matrix]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure faults, or write the page."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaigns.kill_matrix", description=__doc__)
    parser.add_argument("--faults", default="*", metavar="PATTERN", help="these alone (shell wildcards)")
    parser.add_argument("--scope", default="chapter", choices=["chapter", "named"], help="the contracts that run")
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="the data: read, then appended to")
    parser.add_argument("--minutes", type=float, default=0.0, help="measure for so long (0: only write the page)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    every = load()
    if options.minutes:
        known = {row.fault for row in read(options.resume) if options.scope in ("named", row.scope)}
        chosen = [
            fault for fault in every.values() if fnmatchcase(fault.name, options.faults) and fault.name not in known
        ]
        measure(in_turn(chosen), options.scope, options.resume, options.minutes)
    if options.page:
        theirs = pytorch_tests.read(options.resume.with_name(f"{options.resume.stem}-pytorch.csv"))
        rows = [row for row in read(options.resume) if row.fault in every]
        options.page.write_text(kill_page.page(rows, every, theirs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
