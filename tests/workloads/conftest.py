"""What the tests of workloads share: the suite on the documented example."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.measure.threads import one_thread
from tests import reports
from tests.faults.campaigns.campaign import PLAIN, modules
from tests.workloads import example


@dataclass(frozen=True)
class Runner:
    """Runs the suite on the documented example, edited or not, in this process."""

    pytester: pytest.Pytester
    root: Path

    def run(self, *edits: tuple[str, str], contract: str = "*", arguments: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the report of a run at quick; what it printed is in the capture of the test."""
        source = example.source()
        for old, new in edits:
            assert old in source, old
            source = source.replace(old, new)
        (self.pytester.path / "mine.py").write_text(source)
        self.pytester.runpytest_inprocess(
            *modules((contract,)),
            *("-p", "no:randomly", *PLAIN),
            *("--workload", "mine.py:build", "--device", "cpu", "--level", "quick", "--report", "report"),
            *(() if contract == "*" else ("--contract", contract)),
            *arguments,
        )
        return reports.written(self.pytester.path / "report" / "report.json")


@pytest.fixture
def runner(pytester: pytest.Pytester, root: Path) -> Iterator[Runner]:
    """A runner in a folder of its own, on one thread: the model is small."""
    with one_thread():
        yield Runner(pytester, root)
