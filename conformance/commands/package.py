"""The command `package`: put a report, its views and their sums into one archive that a third party can verify."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from ..report import document, package, rollup, text
from ..report.verdicts import Overall
from .console import OK, UsageError, show, write_bytes
from .own import own_suite


def add(commands: Any) -> None:
    """Add `package` to the parser's commands."""
    command = commands.add_parser(
        "package",
        help="put a report, its views and their SHA-256 sums into one archive",
        description="Put a report, its views and their SHA-256 sums into one archive: the same bytes for the same "
        "report. `verify` checks it. A report of a run that did not end, that contradicts itself, or whose suite had "
        "changes that are not committed is refused.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", required=True, help="the archive to write, a ZIP file")
    command.set_defaults(run=_package)


def _package(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    output = Path(arguments.output)
    if os.path.exists(output) and os.path.exists(file) and output.samefile(file):
        raise UsageError(f"--output {output} is the report itself; name another file")
    data = document.content(file)
    report, problems = _examined(file, data)
    if problems:
        raise UsageError(f"{file}: {problems[0]}")
    if rollup.overall(report) is Overall.INCOMPLETE:
        raise UsageError(f"{file}: the run is INCOMPLETE; a package is of a run that ended: run the suite again")
    if report.header.suite.clean is False:
        raise UsageError(
            f"{file}: the suite that judged had changes that are not committed; run it again from a clean checkout"
        )
    archive = package.pack(package.members(data, report, own_suite()))
    if len(archive) > package.MAX_BYTES:
        raise UsageError(f"{file}: its package would have {len(archive)} bytes, at most {package.MAX_BYTES} are read")
    write_bytes(output, archive)
    show(text.line(f"{output}: {len(archive)} bytes, SHA-256 {hashlib.sha256(archive).hexdigest()}"))
    show(f"a run that is {rollup.overall(report).value}; sign the file with your own tool, and send both")
    return OK


def _examined(file: Path, data: bytes) -> tuple[document.Report, list[str]]:
    try:
        return document.examined(data)
    except document.ReportError as error:
        raise type(error)(f"{file}: {error}") from None
