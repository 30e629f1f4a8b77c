"""The command `merge`: many machines' reports as one table."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..report import fleet, fleet_views
from .console import DIFFERENT, OK, UsageError, show, width, write

_SUFFIXES = {".html": "html", ".htm": "html", ".json": "json", ".md": "markdown", ".txt": "text"}


def add(commands: Any) -> None:
    """Add `merge` to the parser's commands."""
    command = commands.add_parser(
        "merge",
        help="put many machines' reports into one table; exit status 1 if a machine stands out or does not "
        "conform, or a report cannot be used",
        description="Put many machines' reports into one table: contracts that fail anywhere, machines whose evidence "
        "differs where the others of their kind agree bit for bit, slow machines, all by GPU, driver and label "
        "(--label KEY=VALUE of a run). Each report is checked as `verify` does. A folder stands for its report, or for "
        "the reports in it.",
    )
    command.add_argument("reports", nargs="+", metavar="REPORT", help="a report, or a folder of reports")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (.html, .md, .json, .txt)")
    command.add_argument(
        "--format", choices=tuple(fleet_views.VIEWS), help="the form (default: by the name of FILE, else text)"
    )
    command.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="read with N processes (default: all processors)",
    )
    command.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    if arguments.processes < 1:
        raise UsageError(f"--processes: {arguments.processes} is not at least 1")
    output = None if arguments.output is None else Path(arguments.output)
    form = arguments.format or _SUFFIXES.get(output.suffix.lower() if output else ".txt")
    if form is None:
        raise UsageError(f"--output {output} ends in none of {', '.join(_SUFFIXES)}; say its --format")
    files = fleet.files(arguments.reports)
    if output is not None and output.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"--output {output} is one of the reports; name another file")
    merged = fleet.merge(files, processes=arguments.processes)
    if not merged.machines:
        first = merged.unusable[0]
        raise UsageError(f"no report can be used; {first.file}: {first.reason}")
    page = fleet_views.as_text(merged, width()) if form == "text" else fleet_views.VIEWS[form](merged)
    if output is not None:
        write(output, page)
    else:
        show(page.rstrip("\n"))
    return DIFFERENT if merged.stands_out else OK
