"""The command `baseline`: reduce a report to what a later run is compared with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..report import baselines, document
from .console import write_bytes


def add(commands: Any) -> None:
    """Add `baseline` to the parser's commands."""
    command = commands.add_parser(
        "baseline",
        help="reduce a report to its verdicts, a small file to compare later runs with",
        description="Write the verdict of each case of a report, without evidence, as a gzipped file of some tens of "
        f"KiB that --baseline and diff take for OLD. Stored ones of stock PyTorch: {', '.join(baselines.names())}; "
        f"{baselines.STOCK!r} is that of the release at hand.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="write to FILE, such as old.json.gz")
    command.add_argument("--base", metavar="NAME", help="write the difference to this stored baseline only")
    command.set_defaults(run=_baseline)


def _baseline(arguments: argparse.Namespace) -> int:
    return write_bytes(Path(arguments.output), baselines.render(document.read(arguments.report), arguments.base))
