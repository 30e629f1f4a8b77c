"""A case that hangs: the process ends, with the stack of every thread and the name of the case."""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from ..report import values
from ..report.encode import encode_case
from ..report.verdicts import Verdict
from .items import Facts, of_case

if TYPE_CHECKING:
    from .run import Run

SECONDS = {"quick": 600, "standard": 1200, "full": 3600}
"""How long one case may take by level: far more than the longest takes on a slow machine, as it judges nothing."""
FOLDER = "conformance_hung"
"""The key under which a worker finds the folder for the record of a case that hung."""
_LOOKS = 20  # how often the watch looks while one case may run
_MERCY = 60.0  # seconds after which a process whose interpreter no longer runs is ended from outside of it

Ended = Callable[[dict[str, Any]], None]


class Watchdog:
    """Ends this process where a case runs longer than the run allows; `ended` takes the record of that case first."""

    def __init__(self, run: Run, ended: Ended) -> None:
        self._run = run
        asked = run.options.case_timeout
        # A case of the user's workload may take all of --time-limit, and ends with the step that it is in then.
        least = 2 * run.time_limit.seconds if run.options.time_limit is not None else 0.0
        self._limit = max(SECONDS[run.options.level], least) if asked is None else asked
        self._ended = ended
        self._lock = threading.Lock()
        self._now: tuple[pytest.Item, Facts, float] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        config = session.config
        # pytest's own plugin takes faulthandler's only timer where it is asked to.
        theirs = config.pluginmanager.hasplugin("faulthandler") and config.getini("faulthandler_timeout")
        stderr = None if theirs else config.stash.get(fault_handler_stderr_fd_key, 2)
        self._thread = threading.Thread(target=self._watch, args=(stderr,), name="conformance-watchdog", daemon=True)
        self._thread.start()

    def pytest_sessionfinish(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("contract") is None:
            return (yield)
        with self._lock:
            self._now = (item, of_case(item), time.monotonic())
        try:
            return (yield)
        finally:
            with self._lock:
                self._now = None

    def _watch(self, stderr: int | None) -> None:
        """Look for a case that runs too long, until the session is over.

        A case may stop the interpreter, and this thread with it. faulthandler's thread still runs then: it ends the
        process, with the stacks on `stderr` (a file descriptor; None leaves its timer to pytest), if this thread has
        not set its timer back for as long as a case may take.
        """
        while not self._over.wait(min(self._limit / _LOOKS, 5.0)):
            if stderr is not None:
                faulthandler.dump_traceback_later(self._limit + _MERCY, exit=True, file=stderr)
            with self._lock:
                if self._now is None or time.monotonic() - self._now[2] < self._limit:
                    continue
                item, found, _ = self._now
                self._ended(self._record(item, found))
        if stderr is not None:
            faulthandler.cancel_dump_traceback_later()

    def _record(self, item: pytest.Item, found: Facts) -> dict[str, Any]:
        from . import judge
        from .environment import redact

        reason = (
            f"it did not end within {self._limit:g} s and was ended; its stack says where it was "
            "(--case-timeout allows more)"
        )
        described = self._run.describe(found.parameters, "own" in item.fixturenames)  # type: ignore[attr-defined]
        made: values.Case = judge.record(
            id=found.id,
            contract=found.contract,
            node=item.nodeid,
            target=found.target_name,
            parameters=described,
            case=None,
            judgement=judge.Judgement(Verdict.ERROR, reason, redact(stacks())),
            waiver=None,
            duration=self._limit,
        )
        return encode_case(made)


def stacks() -> str:
    """Return the stack of every thread of this process, as faulthandler writes it."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def of_worker(config: pytest.Config) -> Ended:
    """Return what a worker does with the record of a case that hung: leave it to the controller, and end."""
    worker = config.workerinput  # type: ignore[attr-defined]

    def ended(record: dict[str, Any]) -> None:
        Path(worker[FOLDER], worker["workerid"]).write_text(json.dumps(record), encoding="utf-8")
        os._exit(int(pytest.ExitCode.INTERNAL_ERROR))

    return ended


def left_by(node: Any) -> dict[str, Any] | None:
    """Return the record of the case that hung in the worker at `node` of pytest-xdist; None where it left none."""
    try:
        text = Path(node.workerinput[FOLDER], node.gateway.id).read_text(encoding="utf-8")
    except OSError:
        return None
    record: dict[str, Any] = json.loads(text)
    return record
