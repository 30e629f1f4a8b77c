"""The command line beside pytest, `python -m conformance`: over reports, the catalogue and the torch at hand."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .commands.console import DIFFERENT, OK, USAGE, UsageError, colour, show, width, write
from .version import __version__

try:
    from .commands import arithmetic, calibration, live
    from .report import checklist, diff, document, excuses, explain, rollup, speed, terminal, text
    from .report.encode import encode_case
except ModuleNotFoundError as missing:
    if missing.name != "tabulate":
        raise
    print("python -m conformance needs the package tabulate: pip install tabulate", file=sys.stderr)
    sys.exit(4)

REGRESSION, OUT_OF_DATE = 1, 1
_SHOWN = 20  # contradictions of a report, which has as many as it has cases where it was written by somebody else
# What `explain` tells: its story, and what a report without it lacks.
_SUBJECTS = {
    "scale": (explain.scale, "history of a loss scale"),
    "speed": (speed.story, "speed-up"),
    "waivers": (excuses.story, "case that was waived"),
}


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
        prog="python -m conformance",
        description="Read reports of the AMP conformance suite, and its catalogue; ask the torch at hand in what "
        "precision its ops run. A report is report.json or the folder that holds it.",
        epilog="To judge a machine, run: pytest conformance (with a GPU: pytest conformance --gpu)",
    )
    parser.add_argument("--version", action="version", version=f"amp-conformance {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="diff|checklist|summary|cases|verify|explain|catalogue|surface|ops|fingerprint|trace|calibrate",
    )

    command = commands.add_parser("diff", help="compare two reports; exit status 1 where something regressed")
    command.add_argument("old", metavar="OLD", help="the report to compare with")
    command.add_argument("new", metavar="NEW", help="the report to judge")
    command.set_defaults(run=_diff)

    command = commands.add_parser("checklist", help="write a report as Markdown that can be signed")
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.set_defaults(run=_checklist)

    command = commands.add_parser("summary", help="show a report as the run showed it at its end")
    command.add_argument("report", metavar="REPORT", help="the report")
    command.add_argument("-q", "--quiet", action="store_true", help="one line for each contract that failed")
    command.set_defaults(run=_summary)

    command = commands.add_parser("cases", help="write the cases of a report as JSON, a line for each")
    command.add_argument("report", metavar="REPORT", help="the report")
    command.set_defaults(run=_cases)

    command = commands.add_parser(
        "verify",
        help="hold a report against itself; exit status 1 where it contradicts itself or was changed",
        description="Hold a report against itself: evidence against its bounds, verdicts against evidence, counts and "
        "the footer against the records, the digest against all of it. Every other command refuses a report that does "
        "not hold. A forger who computes the digest anew and contradicts nothing is not found out: for that, run the "
        "suite again, or compare the file's SHA-256 with that of the checklist that was signed.",
    )
    command.add_argument("report", metavar="REPORT", help="the report")
    command.set_defaults(run=_verify)

    command = commands.add_parser(
        "explain",
        help="tell what became of the loss scales in a run, what its speed-ups come from, or what was waived and why",
        description="Tell what happened in a run. `explain scale REPORT` is the story of each loss scale: when it grew "
        "and fell, which iterations were skipped, and where it settled. `explain speed REPORT` is how many times "
        "faster AMP was than fp32, each with its interval and what explains it. `explain waivers REPORT` is every "
        "contract that does not hold and was excused: what was seen, why it is excused, by whom and until when.",
    )
    command.add_argument("subject", nargs="?", metavar="SUBJECT", help=f"what to explain: {', '.join(_SUBJECTS)}")
    command.add_argument("report", nargs="?", metavar="REPORT", help="the report")
    command.add_argument("--contract", action="append", metavar="ID", help="of these contracts only (wildcards)")
    command.set_defaults(run=_explain)

    command = commands.add_parser("catalogue", help="write the catalogue of contracts as Markdown")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.add_argument("--check", metavar="FILE", help="write nothing; exit status 1 where FILE is out of date")
    command.set_defaults(run=_catalogue)

    live.add_commands(commands)
    arithmetic.add_commands(commands)
    calibration.add_commands(commands)
    return parser


def _diff(arguments: argparse.Namespace) -> int:
    old, new = document.read(arguments.old), document.read(arguments.new)
    show(diff.render(old, new, names=(arguments.old, arguments.new), width=width()))
    return REGRESSION if diff.regressions(old, new) else OK


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


def _verify(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    report, problems = document.examine(file)
    for problem in problems[:_SHOWN]:
        show(text.wrap(problem, width(), "- ", "  "))
    if problems:
        more = f" ({len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        show(text.line(f"NOT SOUND: {file} contradicts itself, or was changed after the run{more}"))
        return DIFFERENT
    sealed = "its digest is that of what the run wrote"
    if not (report.footer and report.footer.digest):
        why = "" if report.footer else ", as the run did not end"
        sealed = f"it has no digest{why}: figures that contradict nothing may have been changed"
    counted = f"{text.count(len(report.cases), 'case')} of {text.count(len(report.contracts), 'contract')}"
    show(text.wrap(f"{file}: {counted}; verdicts follow from evidence, counts from records; {sealed}", width()))
    show(f"SOUND: a report of a run that is {rollup.overall(report).value}")
    return OK


def _summary(arguments: argparse.Namespace) -> int:
    report = document.read(arguments.report)
    path = str(document.locate(arguments.report))
    show(terminal.render(report, short=arguments.quiet, width=width(), report_path=path, color=colour()))
    return OK


def _cases(arguments: argparse.Namespace) -> int:
    for case in document.read(arguments.report).cases:
        print(json.dumps(encode_case(case)))
    return OK


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.subject not in _SUBJECTS:
        given = "no subject is given" if arguments.subject is None else f"unknown subject {arguments.subject!r}"
        raise UsageError(f"{given}; there are: {', '.join(_SUBJECTS)} (explain scale REPORT)")
    if arguments.report is None:
        raise UsageError(f"no report is given (explain {arguments.subject} REPORT)")
    file = document.locate(arguments.report)
    report = document.read(file)
    tell, lacking = _SUBJECTS[arguments.subject]
    try:
        story = tell(report, contracts=tuple(arguments.contract or ()), width=width())
    except document.ReportError as error:
        raise type(error)(f"{file}: {error}") from None
    if story is None:
        of = f" of {', '.join(arguments.contract)}" if arguments.contract else ""
        raise UsageError(f"{file}: the report holds no {lacking}{of}")
    show(story)
    return OK


def _catalogue(arguments: argparse.Namespace) -> int:
    # Only this command reads the catalogue, which needs `packaging` (a dependency of pytest).
    from .harness import catalogue, specification

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
    print(f"{path} is out of date: run python -m conformance catalogue -o {path}", file=sys.stderr)
    return OUT_OF_DATE


if __name__ == "__main__":
    sys.exit(main())
