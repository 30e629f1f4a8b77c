"""Snippets under the faults that they were printed for: each must fail there, and pass without the fault.

`python -m tests.faults.campaigns.reproductions --resume FILE.csv --minutes 20 --seed 1` draws faults of all chapters in
turn, runs the contracts that speak of each until one fails, and runs the snippet of that case in two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import random
import re
import runpy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from tests.faults import Fault, load
from tests.faults.campaigns.campaign import run
from tests.faults.campaigns.children import in_child, say

REPRODUCES = "reproduces"
_MORE_THAN_TORCH = re.compile(r"^\s*(?:from|import) (?:amp_)?(?:conformance|tests|pytest|hypothesis)\b", re.M)


@dataclass(frozen=True)
class Row:
    """One fault: the first case that failed under it, and what its snippet did with the fault and without."""

    fault: str
    chapter: str
    case: str
    lines: int
    result: str
    note: str
    seconds: float


def drawn(faults: Sequence[Fault], seed: int) -> list[Fault]:
    """Order faults at random by the seed, all chapters in turn in each beginning."""
    order = random.Random(seed)
    by_chapter: dict[str, list[Fault]] = {}
    for fault in sorted(faults, key=lambda one: one.name):
        by_chapter.setdefault(fault.chapters[0], []).append(fault)
    for own in by_chapter.values():
        order.shuffle(own)
    turns = max(map(len, by_chapter.values()))
    return [own[turn] for turn in range(turns) for own in by_chapter.values() if turn < len(own)]


def tried(fault: Fault) -> Row:
    """Run what speaks of the fault, then the snippet of the first failed case, with the fault and without it."""
    begun = time.monotonic()
    case, note = _failed(fault)
    if case is None:
        outcome, snippet = "not caught", ""
    else:
        snippet = case["snippet"] or ""
        outcome, note = result(fault, snippet)
    seconds = round(time.monotonic() - begun, 1)
    lines = snippet.count("\n") + 1 if snippet else 0
    return Row(fault.name, fault.chapters[0], case["id"] if case else "", lines, outcome, note, seconds)


def _failed(fault: Fault) -> tuple[dict[str, Any] | None, str]:
    """Return the first failed case of a contract that speaks of the fault, as the report has it."""

    def work() -> list[str]:
        cases = [case for case in run(fault, until_caught=True, programs=True).cases if case["verdict"] == "FAIL"]
        named = [case for case in cases if any(fnmatchcase(case["contract"], one) for one in fault.contracts)]
        return [json.dumps({key: case[key] for key in ("id", "snippet")}) for case in named[:1]]

    found, note = in_child(work)
    return (json.loads(next(iter(found))) if found else None), note


def result(fault: Fault, snippet: str) -> tuple[str, str]:
    """Return what a snippet does with the fault and without it, and how it ended."""
    if not snippet:
        return "no snippet", ""
    if match := _MORE_THAN_TORCH.search(snippet):
        return "needs more than torch", match[0].strip()
    clean = _ending(snippet, contextlib.nullcontext)
    if clean:
        return "fails without the fault", clean
    broken = _ending(snippet, fault.applied)
    return (REPRODUCES, broken) if broken else ("passes with the fault", "")


def _ending(snippet: str, around: Callable[[], contextlib.AbstractContextManager[None]]) -> str:
    """Run a snippet as a program of its own in a child; returns how it failed, empty where it did not."""

    def work() -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snippet.py"
            path.write_text(snippet, encoding="utf-8")
            with around():
                try:
                    runpy.run_path(str(path), run_name="__main__")
                except SystemExit as ending:
                    return [f"exit {ending.code}"] if ending.code else []
        return []

    found, note = in_child(work)
    return note or "".join(found)


def read(path: Path) -> list[Row]:
    """Read the rows of a file, none where there is none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            Row(**{**row, "lines": int(row["lines"]), "seconds": float(row["seconds"])})  # type: ignore[arg-type]
            for row in csv.DictReader(stream)
        ]


def summary(rows: Sequence[Row]) -> str:
    """Return how many snippets reproduce of those tried, and what became of the others."""
    judged = [row for row in rows if row.result != "not caught"]
    good = sum(row.result == REPRODUCES for row in judged)
    others = Counter(row.result for row in rows if row.result != REPRODUCES)
    return "; ".join(
        [f"{good} of {len(judged)} snippets reproduce", *(f"{name}: {number}" for name, number in others.most_common())]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try snippets until the time is over, or all of the drawn faults."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaigns.reproductions", description=__doc__)
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="the data: read, then appended to")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="*", metavar="PATTERN", help="these alone (shell wildcards)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a child of a process whose threads have worked hangs
    ends = time.monotonic() + options.minutes * 60
    known = {row.fault for row in read(options.resume)}
    for fault in drawn([one for one in load().values() if fnmatchcase(one.name, options.faults)], options.seed):
        if time.monotonic() > ends:
            break
        if fault.name not in known:
            row = tried(fault)
            new = not options.resume.exists()
            with options.resume.open("a", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, [field.name for field in fields(Row)], lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(asdict(row))
            say(f"{row.seconds:6.1f} s  {row.chapter:9} {row.fault}: {row.result} ({row.lines} lines) {row.note}")
    say(summary(read(options.resume)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
