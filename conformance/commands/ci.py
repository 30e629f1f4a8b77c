"""The command `ci`: show a report on the page and in the log of a CI job."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..report import ci, document
from .console import INCOMPLETE, UsageError, show, write

_SUMMARY = "GITHUB_STEP_SUMMARY"


def add(commands: Any) -> None:
    """Add `ci` to the parser's commands."""
    command = commands.add_parser(
        "ci",
        help="write a summary of at most 60 lines for a CI job, with annotations",
        description="Write a summary in Markdown of at most 60 lines: to the file that --output names, else to the one "
        f"that ${_SUMMARY} names, else to standard output. On GitHub Actions (and Gitea, Forgejo), Azure Pipelines and "
        "TeamCity, which their variables tell, failures become annotations of the job. Exit status: that of the run.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", help="write the summary to FILE")
    command.set_defaults(run=_ci)


def _ci(arguments: argparse.Namespace) -> int:
    report = document.read(arguments.report)
    for line in ci.annotated(report, os.environ):
        show(line)
    content = ci.summary(report)
    page = os.environ.get(_SUMMARY)
    if arguments.output is not None:
        write(Path(arguments.output), content)
        if os.environ.get("TF_BUILD"):
            show(f"##vso[task.uploadsummary]{Path(arguments.output).resolve()}")
    elif page:
        _append(Path(page), content)
    else:
        show(content.rstrip("\n"))
    return report.footer.exit_status if report.footer else INCOMPLETE


def _append(file: Path, content: str) -> None:
    """Add `content` to what other steps of the job have written."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(content)
    except OSError as error:
        raise UsageError(f"${_SUMMARY} {file} cannot be written: {error.strerror or error}") from None
