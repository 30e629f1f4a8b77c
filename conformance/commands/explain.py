"""The command `explain`: loss scales, speed-ups, waivers and the programs of failed cases."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import document, excuses, explain, speed
from .console import OK, UsageError, show, width

# What `explain` shows, and what a report without it lacks.
_SUBJECTS = {
    "scale": (explain.scale, "history of a loss scale"),
    "snippet": (explain.snippet, "program of a failed case"),
    "speed": (speed.render, "speed-up"),
    "waivers": (excuses.render, "case that was waived"),
}


def add(commands: Any) -> None:
    """Add `explain` to the parser's commands."""
    command = commands.add_parser(
        "explain",
        help="show the loss scales of a run, its speed-ups with their causes, what was waived and why, or the program "
        "of a failed case",
        description="Show what happened in a run. `explain scale REPORT`: the history of each loss scale: when it grew "
        "and fell, which iterations were skipped, and where it settled. `explain speed REPORT` is how many times "
        "faster AMP was than fp32, each with its interval and what explains it. `explain waivers REPORT` is every "
        "contract that does not hold and was excused: what was seen, why it is excused, by whom and until when. "
        "`explain snippet REPORT --contract ID` prints a program that shows the first failed case with torch alone: it "
        "ends with an error where the contract does not hold.",
    )
    command.add_argument("subject", nargs="?", metavar="SUBJECT", help=f"what to explain: {', '.join(_SUBJECTS)}")
    command.add_argument("report", nargs="?", metavar="REPORT", help="the report")
    command.add_argument(
        "--contract",
        action="append",
        metavar="ID",
        help="of these contracts only (wildcards); of a snippet, also the id of a case",
    )
    command.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.subject not in _SUBJECTS:
        given = "no subject is given" if arguments.subject is None else f"unknown subject {arguments.subject!r}"
        raise UsageError(f"{given}; there are: {', '.join(_SUBJECTS)} (explain scale REPORT)")
    if arguments.report is None:
        raise UsageError(f"no report is given (explain {arguments.subject} REPORT)")
    file = document.locate(arguments.report)
    report = document.read(file)
    view, lacking = _SUBJECTS[arguments.subject]
    try:
        page = view(report, contracts=tuple(arguments.contract or ()), width=width())
    except document.ReportError as error:
        raise type(error)(f"{file}: {error}") from None
    if page is None:
        of = f" of {', '.join(arguments.contract)}" if arguments.contract else ""
        raise UsageError(f"{file}: the report holds no {lacking}{of}")
    show(page)
    return OK
