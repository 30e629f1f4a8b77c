"""The same faults against PyTorch's own AMP tests, those of them that run on a CPU.

`python -m tests.faults.campaigns.pytorch_tests --pytorch-tests FOLDER --matrix docs/evidence/kill-matrix.csv
--resume docs/evidence/kill-matrix-pytorch.csv --minutes 10` runs the tests of the folder (test_autocast.py and the
GradScaler tests of test_torch.py) under faults that the matrix has and the file has not, and appends what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.faults import Fault, load
from tests.faults.campaigns.campaign import PLAIN
from tests.faults.campaigns.children import in_child, in_turn, say

_SELECTED = "autocast or grad_scal"
_COLUMNS = ("fault", "tests", "seconds", "failed", "note")


class Tests:
    """A pytest plugin that runs the collected tests in a child for each fault."""

    def __init__(self, faults: Sequence[Fault], path: Path, ends: float) -> None:
        self._faults = faults
        self._path = path
        self._ends = ends

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Take the place of pytest's loop; tests that fail with nothing broken are left out."""
        items = session.items
        broken, note = in_child(lambda: [item.nodeid for item in items if _fails(item)])
        items = [item for item in items if item.nodeid not in broken]
        say(f"{len(items)} tests of PyTorch; fails unbroken: {sorted(broken)} {note}")
        for fault in self._faults:
            if time.monotonic() > self._ends:
                break
            begun = time.monotonic()
            failed, note = in_child(lambda fault=fault: _under(fault, items))  # type: ignore[misc]
            seconds = round(time.monotonic() - begun, 1)
            names = " ".join(sorted(name.split("::")[-1] for name in failed))
            append(self._path, (fault.name, len(items), seconds, names, note))
            say(f"{seconds:6.1f} s  {fault.name}: {len(failed)} failed {note}")
        return True


def _under(fault: Fault, items: Sequence[pytest.Item]) -> list[str]:
    with fault.applied():
        return [item.nodeid for item in items if _fails(item)]


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def append(path: Path, row: Sequence[object]) -> None:
    """Add a row at the end of the file."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        if new:
            writer.writerow(_COLUMNS)
        writer.writerow(row)


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if None not in row.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests under faults of the matrix."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaigns.pytorch_tests", description=__doc__)
    parser.add_argument("--pytorch-tests", type=Path, required=True, metavar="FOLDER", help="PyTorch's test files")
    parser.add_argument("--matrix", type=Path, required=True, metavar="FILE", help="the data of the kill matrix")
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="the data: read, then appended to")
    parser.add_argument("--minutes", type=float, default=10.0, help="measure for so long")
    options = parser.parse_args(arguments)
    known = {row["fault"] for row in read(options.resume)}
    measured = {row["fault"] for row in read(options.matrix)} - known
    faults = in_turn(fault for fault in load().values() if fault.name in measured)
    torch.set_num_threads(1)  # a child of a process whose threads have worked hangs
    folder = str(options.pytorch_tests)
    given = [
        folder,
        "-q",
        *PLAIN,
        "-p",
        "no:randomly",
        "-n",
        "0",
        "-k",
        _SELECTED,
        "-c",
        "/dev/null",
        "--rootdir",
        folder,
    ]
    ends = time.monotonic() + options.minutes * 60
    with contextlib.redirect_stdout(io.StringIO()):
        return int(pytest.main(given, plugins=[Tests(faults, options.resume.resolve(), ends)]))


if __name__ == "__main__":
    sys.exit(main())
