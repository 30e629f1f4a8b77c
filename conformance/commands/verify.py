"""The command `verify`: check that a report does not contradict itself."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import document, rollup, text
from .console import DIFFERENT, OK, show, width

_SHOWN = 20  # contradictions of a report, which has as many as it has cases where somebody else wrote it


def add(commands: Any) -> None:
    """Add `verify` to the parser's commands."""
    command = commands.add_parser(
        "verify",
        help="hold a report against itself; exit status 1 where it contradicts itself or was changed",
        description="Hold a report against itself: evidence against its bounds, verdicts against evidence, counts and "
        "the footer against the records, the digest against all of it. Every other command refuses a report that does "
        "not hold. A forger who computes the digest anew and contradicts nothing is not found out: for that, run the "
        "suite again, or compare the file's SHA-256 with that of the checklist that was signed.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    report, problems = document.examine(file)
    for problem in problems[:_SHOWN]:
        show(text.wrap(problem, width(), "- ", "  "))
    if problems:
        more = f" ({len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        show(text.line(f"NOT SOUND: {file} contradicts itself, or was changed after the run{more}"))
        return DIFFERENT
    sealed = "its digest is that of what the run wrote"
    if not (report.footer and report.footer.digest):
        why = "" if report.footer else ", as the run did not end"
        sealed = f"it has no digest{why}: figures that contradict nothing may have been changed"
    counted = f"{text.count(len(report.cases), 'case')} of {text.count(len(report.contracts), 'contract')}"
    show(text.wrap(f"{file}: {counted}; verdicts follow from evidence, counts from records; {sealed}", width()))
    show(f"SOUND: a report of a run that is {rollup.overall(report).value}")
    return OK
