"""The command `cases`: write the cases of a report as JSON Lines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..report import document
from ..report.encode import encode_case
from .console import OK


def add(commands: Any) -> None:
    """Add `cases` to the parser's commands."""
    command = commands.add_parser("cases", help="write the cases of a report as JSON, a line for each")
    command.add_argument("report", metavar="REPORT", help="the report")
    command.set_defaults(run=_cases)


def _cases(arguments: argparse.Namespace) -> int:
    for case in document.read(arguments.report).cases:
        print(json.dumps(encode_case(case)))
    return OK
