"""Hooks of the process that writes the report and prints the summary."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import junit, watchdog
from .items import CHAPTERS

if TYPE_CHECKING:
    from .run import Run


class Controller:
    """The hooks of the process that writes the report."""

    def __init__(self, run: Run) -> None:
        from .reporting import Reporter

        self._run = run
        self._reporter = Reporter(run)
        self._hung = tempfile.mkdtemp(prefix="conformance-hung-")

    def folder(self) -> Path:
        """Return the folder of the report."""
        return self._reporter.folder

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            self._reporter.begin()
            self._say(session.config, self._reporter.said_before())
            return (yield)
        except KeyboardInterrupt:
            # A session that is interrupted before all hooks have begun it ends without pytest_sessionfinish.
            self._reporter.finish(int(pytest.ExitCode.INTERRUPTED))
            raise

    def _say(self, config: pytest.Config, words: str | None) -> None:
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and words is not None:
            terminal.write_line(words)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        if self._run.options.self_check and not session.config.option.collectonly:
            self._self_check(session)
        return (yield)

    def _self_check(self, session: pytest.Session) -> None:
        """Plant faults and note what noticed them; a process that is not whole afterwards judges nothing."""
        from ..report import self_check as words
        from .self_check import Spoilt, self_check

        try:
            self._run.self_check = self_check(session, self._run)
        except Spoilt as error:
            self._run.broke(f"self-check: {error}; nothing else was run")
            self._run.stopped = True
            pytest.exit(f"self-check: {error}", returncode=int(pytest.ExitCode.TESTS_FAILED))
        self._say(session.config, words.brief(self._run.self_check))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (entry := getattr(report, "conformance", None)) is not None:
            self._reporter.add(entry)
            if (lost := getattr(report, "lost_device", None)) is not None:
                self._run.lose(lost)
        elif report.failed and _ours(report.nodeid):
            # A teardown that raised, or under xdist a worker process that died in the middle of a case.
            self._run.broke(f"{report.nodeid}: the {report.when} phase broke: {_last_line(report)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give an xdist worker a folder of this user alone for the record of a case that hangs."""
        node.workerinput[watchdog.FOLDER] = self._hung

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """Take the record of a case that hung from the worker that ended because of it; xdist replaces the worker."""
        if (record := watchdog.left_by(report.node)) is not None:
            report.conformance = record  # type: ignore[attr-defined]
            report.longrepr = f"{record['id']}: {record['reason']}\n{record['detail']}"

    def hung(self, config: pytest.Config, record: dict[str, Any]) -> None:
        """End the run in this process, where a case hangs: write its record and the report, show it, and leave."""
        run = self._run
        run.interrupted = True
        run.problems.append(f"{record['id']} hangs: {record['reason']}")
        self._reporter.add(record)
        status = self._reporter.finish(int(pytest.ExitCode.INTERRUPTED))
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"{record['id']} hangs\n{record['detail']}")
            self.pytest_terminal_summary(terminal)
            terminal.flush()
        os._exit(status)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._run.broke(f"{report.nodeid or 'collection'}: cannot be collected: {_last_line(report)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over what an xdist worker collected, since the controller collects nothing itself."""
        output = getattr(node, "workeroutput", {})
        if "conformance" in output:
            self._run.merge(output["conformance"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Leave out frames without a line, with which pytest cannot show where a signal fell."""
        excinfo.traceback = excinfo.traceback.filter(lambda entry: entry._rawentry.tb_lineno is not None)

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._hung, ignore_errors=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._run.stopped = self._run.stopped or bool(session.shouldstop or session.shouldfail)
        if exitstatus == pytest.ExitCode.INTERRUPTED and session.shouldfail:
            # To pytest-xdist the end that --maxfail asks for is an interrupt.
            exitstatus = pytest.ExitCode.TESTS_FAILED
        session.exitstatus = self._reporter.finish(int(exitstatus))
        junit.add(session.config, self._reporter.unlike_a_case())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        short = terminalreporter.verbosity < 0
        width = min(max(terminalreporter._tw.fullwidth, 80), 100)
        text = self._reporter.summary(short=short, width=width)
        terminalreporter.ensure_newline()
        terminalreporter.write_line("")
        terminalreporter.write_line(text)


def _ours(nodeid: str) -> bool:
    return Path(nodeid.split("::")[0]).name.startswith("test_") and CHAPTERS.name in Path(nodeid.split("::")[0]).parts


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
