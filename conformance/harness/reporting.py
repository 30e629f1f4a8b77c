"""The report of a run, from its header before the first case to its verdict and summary."""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ..measure.health import Watch
from ..report import consistency, layout, terminal, values
from . import environment, outcome, targets
from .header import header
from .recorder import Recorder, ReportInUse
from .run import Run


class Reporter:
    """Writes the report of `run`; made in the process that the user started."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._recorder: Recorder | None = None
        self._folder = Path()

    def begin(self) -> None:
        """Open the report and try the devices; where even the basics fail, the run ends here."""
        run = self._run
        self._folder = run.options.report or _default_folder(run.surroundings.here)
        self._header = header(run)
        try:
            self._recorder = Recorder(self._folder, self._header)
        except ReportInUse as error:
            raise pytest.UsageError(f"--report: {self._folder}: {error}") from None
        except OSError as error:
            raise pytest.UsageError(f"--report: {self._folder} cannot be written to: {error.strerror}") from None
        real = [target for target in run.targets if not target.is_fake]
        watches = [Watch.begin(target.name, target.device) for target in real]
        run.watches = [watch for watch in watches if watch is not None]
        for target in real:
            if (broken := targets.smoke(target)) is not None:
                broken = environment.redact(broken)
                run.smoke_failed = True
                run.problems.append(f"smoke stage: {broken}; nothing else was run")
                self.finish(int(pytest.ExitCode.TESTS_FAILED))
                pytest.exit(f"smoke stage: {broken}", returncode=1)

    def add(self, record: dict[str, Any]) -> None:
        """Take the record (of encode.encode_case) of a case that has ended."""
        self._run.add(record)
        if self._recorder is not None:
            self._recorder.add(record)

    def finish(self, pytest_status: int) -> int:
        """Judge the run, write the footer and the summary; returns the exit status."""
        run = self._run
        if self._recorder is None:
            return pytest_status
        gc.freeze()  # else each collection of garbage looks through all of torch, which takes as long as the rest
        if pytest_status == pytest.ExitCode.INTERNAL_ERROR:
            run.broke("pytest ended with an internal error; what it printed above says where")
        # Workers end their cases in any order, and a plugin may have shuffled them.
        places = {id: place for place, id in enumerate(run.contracts)}
        run.cases.sort(key=lambda case: (places[case.contract], case.id))
        self._report: values.Report = outcome.judged(run, self._header, pytest_status)
        folded = layout.folded(self._report)
        folded["footer"]["digest"] = consistency.digest(folded)
        self._recorder.finish(folded)
        (self._folder / "summary.txt").write_text(self.summary(short=False, width=100) + "\n", encoding="utf-8")
        return int(folded["footer"]["exit_status"])

    def summary(self, *, short: bool, width: int) -> str:
        """Return the summary that the terminal shows."""
        path = os.path.relpath(self._folder / "report.json", self._run.surroundings.here)
        shown = path if not path.startswith("..") else str(self._folder / "report.json")
        return terminal.render(self._report, short=short, width=width, report_path=shown)


def _default_folder(here: Path) -> Path:
    """Name a folder of this run alone; where the current folder is read-only, below the system's temporary one."""
    name = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{os.getpid()}"
    for parent in (here, Path(tempfile.gettempdir())):
        folder = parent / "conformance-reports" / name
        try:
            folder.mkdir(parents=True)
        except OSError:
            continue
        return folder
    return here / "conformance-reports" / name
