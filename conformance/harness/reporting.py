"""The report of a run, from its header before the first case to its verdict and summary."""

from __future__ import annotations

import contextlib
import datetime
import errno
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ..measure.health import Watch
from ..report import consistency, layout, terminal, text, values
from . import environment, outcome, targets
from .header import header
from .recorder import Recorder, ReportInUse
from .run import Run

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Reporter:
    """Writes the report of `run`; made in the process that the user started."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._recorder: Recorder | None = None
        self.folder = Path()
        self._unwritten: str | None = None  # why no more records are written

    def begin(self) -> None:
        """Open the report and try the devices; where even the basics fail, the run ends here."""
        run = self._run
        self.folder = run.options.report or _default_folder(run.surroundings.here)
        self._header = header(run)
        try:
            self._recorder = Recorder(self.folder, self._header)
        except ReportInUse as error:
            raise pytest.UsageError(f"--report: {self.folder}: {error}") from None
        except OSError as error:
            said = f"--report: {self.folder} cannot be written to: {error.strerror}"
            if error.errno in _FULL:
                pytest.exit(said, returncode=int(pytest.ExitCode.INTERNAL_ERROR))
            raise pytest.UsageError(said) from None
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
        if self._recorder is None or self._unwritten is not None:
            return
        try:
            self._recorder.add(record)
        except OSError as error:
            self._unwritten = f"{self._recorder.path.name} cannot be written: {error.strerror}; the run ends here"
            pytest.exit(self._unwritten, returncode=int(pytest.ExitCode.INTERNAL_ERROR))

    def finish(self, pytest_status: int) -> int:
        """Judge the run, write the footer and the summary; returns the exit status."""
        run = self._run
        if self._recorder is None:
            return pytest_status
        run.ending = True
        gc.freeze()  # else each collection of garbage looks through all of torch, which takes as long as the rest
        if self._unwritten is not None:
            run.stopped = True
            run.broke(self._unwritten)
        elif pytest_status == pytest.ExitCode.INTERNAL_ERROR:
            run.broke("pytest ended with an internal error; what it printed above says where")
        # Workers end their cases in any order, and a plugin may have shuffled them.
        places = {id: place for place, id in enumerate(run.contracts)}
        run.cases.sort(key=lambda case: (places[case.contract], case.id))
        self._report: values.Report = outcome.judged(run, self._header, pytest_status)
        try:
            self._write(self._recorder)
        except OSError as error:
            records = text.count(self._recorder.records, "finished record")
            run.broke(f"the report could not be written: {error.strerror}; report.json keeps {records} and no verdict")
            self._report = outcome.concluded(run, self._report, pytest_status)
        assert self._report.footer is not None
        run.status = self._report.footer.exit_status
        return run.status

    def _write(self, recorder: Recorder) -> None:
        """Put the whole report in its place, and the summary beside it; raises OSError."""
        folded = layout.folded(self._report)
        folded["footer"]["digest"] = consistency.digest(folded)
        summary = self.folder / "summary.txt"
        try:
            summary.write_text(self.summary(short=False, width=100) + "\n", encoding="utf-8")
            recorder.finish(folded)
        except OSError:
            recorder.close()
            with contextlib.suppress(OSError):
                summary.unlink(missing_ok=True)
            raise

    def said_before(self) -> str | None:
        """Say what became of an earlier report in the folder; None where there was none."""
        previous = self._recorder.previous if self._recorder is not None else None
        if previous is None:
            return None
        return f"--report: {self._shown(previous.parent)} held a report, which is now {previous.name}"

    def unlike_a_case(self) -> dict[str, str]:
        """Return what fails the run and is no failure of a case, by name: regressions and problems of the run."""
        footer = None if self._recorder is None else self._report.footer
        if footer is None:
            return {}
        baseline = footer.baseline
        found = {f"problem {number}": problem for number, problem in enumerate(footer.problems, start=1)}
        for ids, words in (
            (baseline.regressed if baseline else (), "passed in the baseline and does not pass here"),
            (baseline.gone if baseline else (), "passed in the baseline and is not judged here"),
        ):
            found |= {f"baseline {id}": f"{id} {words}" for id in ids}
        return found

    def summary(self, *, short: bool, width: int) -> str:
        """Return the summary that the terminal shows."""
        path = self._shown(self.folder / "report.json")
        return terminal.render(self._report, short=short, width=width, report_path=path)

    def _shown(self, path: Path) -> str:
        near = os.path.relpath(path, self._run.surroundings.here)
        return near if not near.startswith("..") else str(path)


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
