"""The command `diff`: compare two reports."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..harness import accepted
from ..report import baselines, comparison, diff, document
from .console import DIFFERENT, INCOMPLETE, OK, UsageError, show, width


def add(commands: Any) -> None:
    """Add `diff` to the parser's commands."""
    command = commands.add_parser(
        "diff",
        help="compare two reports; exit status 1 where something regressed",
        description="Compare two reports by the rule of --baseline. Exit status: 0 nothing that passed is worse, "
        "1 something regressed or is gone, 2 a report is of a run that did not end, 4 a file that cannot be used.",
    )
    command.add_argument(
        "old", metavar="OLD", help="the report or baseline to compare with; stock or torch-2.12.1 names a stored one"
    )
    command.add_argument("new", metavar="NEW", help="the report to judge")
    command.add_argument(
        "--accepted-changes",
        action="append",
        default=[],
        metavar="FILE",
        help="excuse the changes that this TOML file names (repeatable)",
    )
    command.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    new = document.read(arguments.new)
    old, name = baselines.read(arguments.old, new.header.environment.torch)
    shown = arguments.old if os.path.exists(arguments.old) else name
    try:
        lines = accepted.read(map(Path, arguments.accepted_changes))
    except accepted.AcceptedError as error:
        raise UsageError(f"--accepted-changes: {error}") from None
    found = comparison.compare(old, new, lines)
    show(diff.render(old, new, found, names=(shown, arguments.new), width=width()))
    if found.incomplete:
        return INCOMPLETE
    return DIFFERENT if found.worse else OK
