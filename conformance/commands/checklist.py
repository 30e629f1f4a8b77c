"""The command `checklist`: write a report as Markdown that can be signed."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from ..report import checklist, document
from .console import OK, UsageError, show, write


def add(commands: Any) -> None:
    """Add `checklist` to the parser's commands."""
    command = commands.add_parser("checklist", help="write a report as Markdown that can be signed")
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.set_defaults(run=_checklist)


def _checklist(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    report = document.read(file)
    page = checklist.render(report, digest=hashlib.sha256(file.read_bytes()).hexdigest())
    if arguments.output is None:
        show(page.rstrip("\n"))
        return OK
    output = Path(arguments.output)
    if os.path.exists(output) and output.samefile(file):
        raise UsageError(f"--output {output} is the report itself; name another file")
    return write(output, page)
