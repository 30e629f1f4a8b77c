"""Hooks of the process that writes the report and prints the summary."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .collection import CHAPTERS

if TYPE_CHECKING:
    from .run import Run


class Controller:
    """The hooks of the process that writes the report."""

    def __init__(self, run: Run) -> None:
        from .reporting import Reporter

        self._run = run
        self._reporter = Reporter(run)

    def pytest_sessionstart(self) -> None:
        self._reporter.begin()

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
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(words.brief(self._run.self_check))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (entry := getattr(report, "conformance", None)) is not None:
            self._reporter.add(entry)
            if (lost := getattr(report, "lost_device", None)) is not None:
                self._run.lose(lost)
        elif report.failed and _ours(report.nodeid):
            # A teardown that raised, or under xdist a worker process that died in the middle of a case.
            self._run.broke(f"{report.nodeid}: the {report.when} phase broke: {_last_line(report)}")

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
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._run.stopped = self._run.stopped or bool(session.shouldstop or session.shouldfail)
        session.exitstatus = self._reporter.finish(int(exitstatus))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        short = terminalreporter.verbosity < 0
        width = min(max(terminalreporter._tw.fullwidth, 80), 120)
        text = self._reporter.summary(short=short, width=width)
        terminalreporter.ensure_newline()
        terminalreporter.write_line("")
        terminalreporter.write_line(text)


def _ours(nodeid: str) -> bool:
    return Path(nodeid.split("::")[0]).name.startswith("test_") and CHAPTERS.name in Path(nodeid.split("::")[0]).parts


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
