"""The command `summary`: show a report as the run showed it at its end."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import comparison, document, terminal
from .console import INCOMPLETE, OK, colour, show, width


def add(commands: Any) -> None:
    """Add `summary` to the parser's commands."""
    command = commands.add_parser(
        "summary", help="show a report as the run showed it at its end; exit status 2 for a run that did not end"
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-q", "--quiet", action="store_true", help="one line for each contract that failed")
    command.set_defaults(run=_summary)


def _summary(arguments: argparse.Namespace) -> int:
    report = document.read(arguments.report)
    path = str(document.locate(arguments.report))
    ended = not comparison.incomplete(report)
    if not ended:
        show(f"INCOMPLETE: {path} is of a run that did not end; nothing below is a pass\n")
    show(terminal.render(report, short=arguments.quiet, width=width(), report_path=path, color=colour()))
    return OK if ended else INCOMPLETE
