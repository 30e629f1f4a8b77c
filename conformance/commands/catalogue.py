"""The command `catalogue`: write the catalogue of contracts as Markdown."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..invocation import COMMAND
from .console import OK, UsageError, show, write

OUT_OF_DATE = 1


def add(commands: Any) -> None:
    """Add `catalogue` to the parser's commands."""
    command = commands.add_parser("catalogue", help="write the catalogue of contracts as Markdown")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.add_argument("--check", metavar="FILE", help="write nothing; exit status 1 where FILE is out of date")
    command.set_defaults(run=_catalogue)


def _catalogue(arguments: argparse.Namespace) -> int:
    # Only this command reads the catalogue, which needs `packaging` (a dependency of pytest).
    from ..harness import catalogue, specification

    page = specification.render(catalogue.load())
    if arguments.check is not None:
        return _compare(Path(arguments.check), page)
    if arguments.output is not None:
        return write(Path(arguments.output), page)
    show(page.rstrip("\n"))
    return OK


def _compare(path: Path, page: str) -> int:
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"--check {path} is not a regular file")
    try:
        current = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--check {path} cannot be read: {error.strerror or error}") from None
    if current == page:
        return OK
    print(f"{path} is out of date: run {COMMAND} catalogue -o {path}", file=sys.stderr)
    return OUT_OF_DATE
