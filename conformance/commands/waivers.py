"""The command `waivers`: list the written excuses, the days that they have left, and what they excuse in a report."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report import document, excuses, text
from .console import DIFFERENT, OK, UsageError, show, width


def add(commands: Any) -> None:
    """Add `waivers` to the parser's commands."""
    command = commands.add_parser(
        "waivers",
        help="list the waivers with their days left; with a report, what they excuse there",
        description="List the waivers of the suite, those that end first at the top, with the days that each has left. "
        "With a report, list those of that run with what they excuse there; that needs no torch. Exit status 1 where "
        "a waiver has expired, or where the report says that one matches no case or is no longer needed.",
    )
    command.add_argument("report", nargs="?", metavar="REPORT", help="the report")
    command.add_argument(
        "--waivers", action="append", default=[], metavar="FILE", help="list those of this TOML file too (repeatable)"
    )
    command.set_defaults(run=_waivers)


def _waivers(arguments: argparse.Namespace) -> int:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    if arguments.report is not None and arguments.waivers:
        raise UsageError("a report has its own waivers: give REPORT or --waivers FILE")
    rows = _of_report(arguments.report) if arguments.report is not None else _of_files(arguments.waivers)
    found = sorted(rows)
    for ends, head, lines, _ in found:
        show(text.wrap(f"{head}: {_left(ends, today)}", width(), "", "  "))
        for line in lines:
            show(text.wrap(line, width(), "  ", "    "))
    stale = sum(rotten or ends < today for ends, _, _, rotten in found)
    show(
        f"{text.count(len(found), 'waiver')}; {stale} that no longer hold"
        if stale
        else text.count(len(found), "waiver")
    )
    return DIFFERENT if stale else OK


def _left(ends: datetime.date, today: datetime.date) -> str:
    """Return how long a waiver is in force; its last day counts."""
    days = (ends - today).days
    return f"EXPIRED on {ends}" if days < 0 else f"{text.count(days, 'day')} left (until {ends})"


_CASES = 4  # patterns of a waiver that are shown; those of the relations over torch's databases have a hundred
_Row = tuple[datetime.date, str, tuple[str, ...], bool]  # the last day, contract and cases, more lines, whether it rots


def _of_files(paths: list[str]) -> Iterator[_Row]:
    """Yield the waivers of the suite and of the user's files; raises UsageError."""
    from ..harness.requirements import torch_problem

    if (problem := torch_problem()) is not None:
        raise UsageError(f"{problem} (waivers REPORT needs no torch)")
    from ..harness import catalogue, waivers

    known = catalogue.load().contracts
    try:
        found = [*waivers.shipped(known), *(waiver for path in paths for waiver in waivers.read(Path(path), known))]
    except waivers.WaiverError as error:
        raise UsageError(str(error)) from None
    for waiver in found:
        where = f"torch {waiver.torch or 'of any version'}, on {', '.join(waiver.targets)}".replace(
            "on *", "all targets"
        )
        where += f", built for {waiver.build}" * bool(waiver.build) + ", not run" * (not waiver.run)
        lines = (known[waiver.contract].title, f"{where}; by {waiver.owner}", waiver.reason, waiver.link)
        yield waiver.expires, f"{waiver.contract} ({text.some(list(waiver.cases), _CASES)})", lines, False


def _of_report(path: str) -> Iterator[_Row]:
    """Yield the waivers of a run with what became of each; raises ReportError, and UsageError where it did not end."""
    report = document.read(path)
    if report.footer is None:
        raise UsageError(f"{document.locate(path)}: the run did not end, so what became of its waivers is not known")
    excused = {(one.contract.id, one.reason): one.cases for one in excuses.excuses(report)}
    for waiver in report.footer.waivers:
        cases = excused.get((waiver.contract, waiver.reason), ()) if waiver.state == "used" else ()
        here = f"{waiver.state}: excuses {text.count(len(cases), 'case')} here" if cases else waiver.state
        lines = [f"{here}; by {waiver.owner}", waiver.reason, waiver.link]
        if waiver.contract in report.contracts:
            lines.insert(0, report.contracts[waiver.contract].title)
        rotten = waiver.state in ("expired", "unmatched", "unneeded")
        yield _day(waiver.expires), f"{waiver.contract} ({text.some(list(waiver.cases), _CASES)})", tuple(lines), rotten


def _day(words: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(words)
    except ValueError:
        raise UsageError(f"{text.line(words)!r} is no day of the calendar") from None
