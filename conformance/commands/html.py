"""The command `html`: write a report as one HTML file."""

from __future__ import annotations

import argparse
from typing import Any

from ..report import baselines, document, page
from .console import deliver


def add(commands: Any) -> None:
    """Add `html` to the parser's commands."""
    command = commands.add_parser(
        "html",
        help="write a report as one HTML file: verdict, failures, contracts, cases, evidence, pictures",
        description="Write a report as one HTML file that needs nothing else: it loads nothing from the network.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.add_argument(
        "--against",
        metavar="OLD",
        help="mark the autocast rules that differ from those of this report or baseline (such as stock)",
    )
    command.set_defaults(run=_html)


def _html(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    report = document.read(file)
    release = report.header.environment.torch
    against = baselines.read(arguments.against, release)[0] if arguments.against is not None else None
    try:
        content = page.render(report, digest=document.sha256(file), against=against)
    except document.ReportError as error:
        raise type(error)(f"{file}: {error}") from None
    return deliver(content, arguments.output, [arguments.report, arguments.against])
