"""The command `checklist`: write a report as two pages that can be signed, with an annex."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import checklist, document
from .console import deliver


def add(commands: Any) -> None:
    """Add `checklist` to the parser's commands."""
    command = commands.add_parser(
        "checklist",
        help="write a report as two pages that can be signed",
        description="Write a report as two pages to sign: the machine, what was run, the verdict by chapter, "
        "every failure, waiver and thing not run. In HTML they are two pages of A4 when a browser prints them.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.add_argument("--format", choices=checklist.FORMS, default="markdown", help="default markdown")
    command.add_argument("--annex", action="store_true", help="add each contract, measured against required")
    command.set_defaults(run=_checklist)


def _checklist(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    report = document.read(file)
    content = checklist.render(report, digest=document.sha256(file), form=arguments.format, with_annex=arguments.annex)
    return deliver(content, arguments.output, [arguments.report])
