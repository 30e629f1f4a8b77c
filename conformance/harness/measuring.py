"""What a check that takes time gets from the run: an idle machine, a share of the deadline, a line of progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from .catalogue import Contract
from .endings import Inconclusive, Untestable

# Seconds that all timed cases of one chapter on one device may take together.
DEADLINES = {
    "accelerator": {"quick": 15.0, "standard": 75.0, "full": 600.0},
    "cpu": {"quick": 8.0, "standard": 40.0, "full": 240.0},
}
TIMED = ("memory", "speed")
_SPARSE, _OFTEN = 15.0, 0.2  # seconds between two lines of progress, and two states of a line that is overwritten
# Of VT100 terminals: keep the place of the cursor, go back to it, erase what stands right of it.
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"


def attended() -> float:
    """Return monotonic time minus this thread's run-queue wait, in seconds.

    So CPU contention does not consume the time budget of a measurement. Source: sched-stats of the Linux kernel, second
    field; without it all seconds count.
    """
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        waited = 0.0
    return time.monotonic() - waited


class Deadlines:
    """Shares the time of each chapter among its timed cases: what one leaves unused goes to those that follow.

    A case that is judged shares it with those that are judged; one of information takes its part of what they leave,
    and what it takes beyond its part, such as a run that was longer than foreseen, is not theirs.
    """

    def __init__(self, level: str, now: Callable[[], float] = attended) -> None:
        self.now = now
        self._level = level
        self._seconds: dict[str, float] = {}
        self._left: Counter[tuple[str, bool]] = Counter()
        self._ends: dict[tuple[str, bool], float] = {}

    def plan(self, cases: Iterable[tuple[Contract, str]]) -> None:
        """Take in the timed cases of the run, each as its contract and its device type."""
        rows = list(cases)
        self._left = Counter((contract.chapter, contract.judges) for contract, _ in rows)
        for chapter, device_type in {(contract.chapter, device_type) for contract, device_type in rows}:
            kind = "cpu" if device_type == "cpu" else "accelerator"
            self._seconds[chapter] = self._seconds.get(chapter, 0.0) + DEADLINES[kind][self._level]

    def of_chapters(self, chapters: Iterable[str]) -> float:
        """Return the seconds that the timed cases of `chapters` may take: planned, or those of one device on a CPU."""
        timed = set(chapters) & set(TIMED)
        return sum(self._seconds.get(chapter, DEADLINES["cpu"][self._level]) for chapter in timed)

    def begin(self, contract: Contract) -> float:
        """Return when the next timed case of `contract` has to end.

        Where no time is left it raises Inconclusive, or, where nothing would be judged, Untestable.
        """
        now, chapter, judges = self.now(), contract.chapter, contract.judges
        for judged in (True, False):
            self._ends.setdefault((chapter, judged), now + self._seconds[chapter])
        ends = self._ends[chapter, judges]
        cases = self._left[chapter, True] + (0 if judges else self._left[chapter, False])
        self._left[chapter, judges] -= 1
        if now >= ends:
            raise (Inconclusive if judges else Untestable)(
                f"the {self._seconds[chapter]:g} s that --level {self._level} gives the chapter {chapter} were spent "
                "before; a deeper level has more, and --chapter or --contract leave fewer cases"
            )
        return now + (ends - now) / max(1, cases)

    def end(self, contract: Contract, ends: float) -> None:
        """Take in that the case of `contract` that had to end at `ends` has ended now."""
        if not contract.judges:
            self._ends[contract.chapter, True] += max(0.0, self.now() - ends)


class Progress:
    """What is being measured, on the terminal: after the dots, where it leaves no trace, or as a line now and then."""

    def __init__(self, config: pytest.Config, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now = now
        self._shown = now()
        self._there = False

    def show(self, words: str) -> None:
        """Show `words` while the case goes on."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or reporter.verbosity < 0:
            return
        if self._now() - self._shown < (_OFTEN if reporter.isatty else _SPARSE):
            return
        self._shown = self._now()
        with self._uncaptured():
            if not reporter.isatty:
                reporter.ensure_newline()
                reporter.write_line(words)
                return
            room = reporter._tw.fullwidth - reporter._tw.width_of_current_line - 2
            self._write(reporter, f"{_SAVE} {words[: max(room, 0)]}{_ERASE}{_RESTORE}")
            self._there = True

    def clear(self) -> None:
        """Take away what stands after the dots when its case has ended."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._there and reporter is not None:
            with self._uncaptured():
                self._write(reporter, _ERASE)
            self._there = False

    def _write(self, reporter: pytest.TerminalReporter, words: str) -> None:
        # Past pytest's writer, which counts what it writes to know where its line ends.
        reporter._tw._file.write(words)
        reporter._tw._file.flush()

    def _uncaptured(self) -> AbstractContextManager[None]:
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        return nullcontext() if capture is None else capture.global_and_fixture_disabled()
