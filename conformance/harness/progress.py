"""How far a run is: the chapter, the cases that are left and an estimate, on the terminal and in progress.json."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..report import text
from . import measuring
from .items import facts
from .time_limit import rounded

if TYPE_CHECKING:
    from .run import Run

FILE = "progress.json"
SCHEMA = "amp-conformance-progress/1"
_OFTEN = 1.0  # seconds between two states of the file


class Meter:
    """Counts the cases that have ended, in the process that writes the report."""

    def __init__(
        self, run: Run, config: pytest.Config, folder: Callable[[], Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._folder = folder
        self._clock = clock
        self._line = measuring.Progress(config)
        self._begun = self._written = clock()
        self._total = self._done = 0
        self._timed = self._timed_done = 0  # of the cases, those that share the deadline of their chapter
        self._last: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take in the cases of this process: all, or after the workers those that have to be alone."""
        if self._run.sought is None:
            self._total += len(session.items)
            found = [facts(item) for item in session.items]
            self._timed += sum(one is not None and one.timed for one in found)
            self._begun = self._clock() if not self._done else self._begun

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Take in the cases of the workers, each of which collects all of them."""
        if not self._total:
            self._total, self._begun = len(ids), self._clock()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Iterator[None]:
        self._line.clear()
        result = yield
        if (entry := getattr(report, "conformance", None)) is not None:
            contract = self._run.catalogue.contracts[entry["contract"]]
            self._done += 1
            self._timed_done += contract.chapter in measuring.TIMED and bool(self._timed)
            self._last = {"chapter": contract.chapter, "case": entry["id"]}
            self._line.show(self.words())
            if self._clock() - self._written >= _OFTEN:
                self._write("running", None)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._line.clear()
        self._write("ended", int(session.exitstatus))

    def words(self) -> str:
        """Return the line for a person: `scale: 1200 cases left, about 40 s`."""
        left = text.count(self._left(), "case")
        return f"{self._last['chapter']}: {left} left, about {rounded(self.seconds_left())}"

    def seconds_left(self) -> float:
        """Estimate the rest of the run: timed chapters take their deadline, other cases as long as those before."""
        timed_left = max(0, self._timed - self._timed_done)
        others_done, others_left = self._done - self._timed_done, self._left() - timed_left
        pace = (self._clock() - self._begun) / others_done if others_done and not self._timed_done else 0.0
        share = timed_left / self._timed if self._timed else 1.0
        return pace * max(0, others_left) + share * self._run.deadlines.of_chapters(self._run.chapters)

    def _left(self) -> int:
        return max(0, self._total - self._done)

    def _write(self, state: str, status: int | None) -> None:
        """Put the state into the file; a disk that is full stops no run."""
        self._written = self._clock()
        said = {
            "schema": SCHEMA,
            "state": state,
            "chapter": self._last.get("chapter"),
            "case": self._last.get("case"),
            "done": self._done,
            "left": self._left(),
            "seconds_left": round(self.seconds_left(), 1) if state == "running" else 0.0,
            "exit_status": status,
            "updated": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        file = self._folder() / FILE
        with contextlib.suppress(OSError):
            new = file.with_suffix(".new")
            try:
                new.write_text(json.dumps(said) + "\n", encoding="utf-8")
                os.replace(new, file)
            except OSError:
                new.unlink(missing_ok=True)
