"""The command `verify`: check a report or a package, and say what limits its verdict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import acceptance, document, package, rollup, text
from ..report.verdicts import Overall
from .console import DIFFERENT, INCOMPLETE, OK, UsageError, show, width
from .own import accepted_waivers, own_catalogue, own_suite

_SHOWN = 20  # contradictions of a report, which has as many as it has cases where somebody else wrote it


def add(commands: Any) -> None:
    """Add `verify` to the parser's commands."""
    command = commands.add_parser(
        "verify",
        help="check a report or a package; exit status 1 if it contradicts itself or was changed",
        description="Check a report or a package of one: verdicts against evidence, evidence against its bounds, "
        "counts and the footer against the records, the digest, each contract of the catalogue, and of a package its "
        "form, its sums and its views. Then say what was waived or not run. A forger who computes the digest anew and "
        "contradicts nothing is not found: check the signature of the package with your own tool.",
    )
    command.add_argument("report", metavar="REPORT", help="the report, or the package of one")
    command.add_argument(
        "--complete",
        action="store_true",
        help="exit status 1 also if anything was narrowed, not run or waived beyond what is accepted",
    )
    command.add_argument(
        "--level",
        choices=acceptance.DEPTHS,
        default="standard",
        help="with --complete: the least depth that is accepted (default standard)",
    )
    command.add_argument(
        "--without-accelerator", action="store_true", help="with --complete: accept a run that judged the CPU alone"
    )
    command.add_argument(
        "--accept-waivers",
        action="append",
        default=[],
        metavar="FILE",
        type=Path,
        help="with --complete: accept the waivers of this TOML file besides those that the suite ships (repeatable)",
    )
    command.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="CONTRACT",
        help="with --complete: accept that this contract was not judged, or not in all of its cases (repeatable)",
    )
    command.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    file = document.locate(arguments.report)
    terms = acceptance.Terms(
        own_suite(),
        own_catalogue(),
        arguments.level,
        not arguments.without_accelerator,
        accepted_waivers(arguments.accept_waivers),
        arguments.accept,
    )
    if terms.catalogue is not None and (unknown := sorted(set(arguments.accept) - set(terms.catalogue))):
        raise UsageError(f"--accept: there is no contract {unknown[0]!r}")
    packed = package.is_package(file)
    try:
        data = package.content(file) if packed else b""
    except package.PackageError as error:
        raise UsageError(f"{file}: {error}") from None
    members = {}
    try:
        if packed:
            members = package.unpack(data)
            report, problems = document.examined(members[package.REPORT])
        else:
            report, problems = document.examine(file)
    except (package.PackageError, document.ReportError) as error:
        if not packed:
            raise
        show(text.line(f"NOT SOUND: {file}: {error}"))
        return DIFFERENT
    problems += acceptance.unaccounted(report, terms)
    remarks = acceptance.remarks(report, terms)
    if packed:
        try:
            problems += _of_package(members, report, remarks, terms)
        except package.PackageError as error:
            problems.append(str(error))
    if problems:
        return _not_sound(file, problems)
    return _sound(arguments, file, report, remarks, packed)


def _of_package(
    members: dict[str, bytes],
    report: document.Report,
    remarks: list[acceptance.Remark],
    terms: acceptance.Terms,
) -> list[str]:
    """Return what is wrong with a package of a sound report, and add to `remarks` what could not be compared."""
    problems = []
    if report.header.suite.clean is False:
        problems.append("the suite that judged had changes that are not committed")
    differing = package.differing(members, report)
    derived = [name for name in differing if name not in package.VIEWS]
    views = [name for name in differing if name in package.VIEWS]
    problems += [f"{name} is not that of the report in the package" for name in derived]
    made_by = package.about(members).made_by
    if made_by.digest == terms.suite.digest:
        problems += [f"{name} is not what the suite makes of the report in the package" for name in views]
    elif views:
        words = f"packed by another suite (version {made_by.version}): {', '.join(views)} cannot be compared with the"
        remarks.insert(0, acceptance.Remark(f"{words} report", False))
    return problems


def _not_sound(file: Path, problems: Sequence[str]) -> int:
    for problem in problems[:_SHOWN]:
        show(text.wrap(problem, width(), "- ", "  "))
    more = f" ({len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
    show(text.line(f"NOT SOUND: {file} contradicts itself, or was changed after the run{more}"))
    return DIFFERENT


def _sound(
    arguments: argparse.Namespace, file: Path, report: document.Report, remarks: list[acceptance.Remark], packed: bool
) -> int:
    sealed = "its digest is that of what the run wrote"
    if not (report.footer and report.footer.digest):
        why = "" if report.footer else ", as the run did not end"
        sealed = f"it has no digest{why}: figures that contradict nothing may have been changed"
    parts = f"; the package has {len(package.NAMES)} members, each with its sum, made from this report" * packed
    counted = f"{text.count(len(report.cases), 'case')} of {text.count(len(report.contracts), 'contract')}"
    overall = rollup.overall(report)
    if overall is Overall.INCOMPLETE:
        show("INCOMPLETE: the run did not come to its end; nothing in it is a pass")
    show(text.wrap(f"{file}: {counted}; verdicts follow from evidence, counts from records; {sealed}{parts}", width()))
    for remark in remarks:
        mark = "- " if remark.accepted or not arguments.complete else "! "
        show(text.wrap(remark.words, width(), mark, "  "))
    short = [remark for remark in remarks if not remark.accepted]
    if arguments.complete and short:
        show(f"NOT COMPLETE: {text.count(len(short), 'fact')} above, with a !, stand against accepting this run")
    elif arguments.complete:
        show("COMPLETE: every contract was judged as asked, and nothing was waived beyond what is accepted")
    show(f"SOUND: a {'package' if packed else 'report'} of a run that is {overall.value}")
    if overall is Overall.INCOMPLETE:
        return INCOMPLETE
    return DIFFERENT if arguments.complete and short else OK
