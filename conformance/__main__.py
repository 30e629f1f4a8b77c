"""The command line beside pytest: reports, the catalogue, and the torch at hand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .commands.console import OK, USAGE, UsageError
from .invocation import COMMAND, RUN
from .version import __version__

try:
    from .commands import (
        baseline,
        calibrate,
        cases,
        catalogue,
        checklist,
        ci,
        diff,
        explain,
        fingerprint,
        html,
        merge,
        ops,
        package,
        summary,
        surface,
        trace,
        verify,
        waivers,
    )
    from .report import document
except ModuleNotFoundError as missing:
    if missing.name != "tabulate":
        raise
    print(f"{COMMAND} needs the package tabulate: pip install tabulate", file=sys.stderr)
    sys.exit(4)

COMMANDS = (
    diff,
    baseline,
    checklist,
    html,
    summary,
    ci,
    cases,
    verify,
    package,
    merge,
    explain,
    catalogue,
    surface,
    ops,
    fingerprint,
    trace,
    calibrate,
    waivers,
)
NAMES = tuple(command.__name__.rsplit(".", 1)[1] for command in COMMANDS)


class _Parser(argparse.ArgumentParser):
    """Ends with the exit status that the suite uses for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; returns the exit status: 0, 1 for a regression, 4 for input that cannot be used."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except (document.ReportError, UsageError) as error:
        print(f"conformance {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of the pipe has seen enough; what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=COMMAND,
        description="Read reports of the AMP conformance suite, and its catalogue; ask the torch at hand in what "
        "precision its ops run. A report is report.json or the folder that holds it.",
        epilog=f"To judge a machine, run: {RUN} (with a GPU: {RUN} --gpu)",
    )
    parser.add_argument("--version", action="version", version=f"amp-conformance {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(NAMES))
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
