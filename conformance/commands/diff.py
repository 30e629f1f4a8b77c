"""The command `diff`: compare two reports."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import diff, document
from .console import OK, show, width

REGRESSION = 1


def add(commands: Any) -> None:
    """Add `diff` to the parser's commands."""
    command = commands.add_parser("diff", help="compare two reports; exit status 1 where something regressed")
    command.add_argument("old", metavar="OLD", help="the report to compare with")
    command.add_argument("new", metavar="NEW", help="the report to judge")
    command.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    old, new = document.read(arguments.old), document.read(arguments.new)
    show(diff.render(old, new, names=(arguments.old, arguments.new), width=width()))
    return REGRESSION if diff.regressions(old, new) else OK
