"""The annex of the checklist: what was judged with what, each contract measured against required, the waivers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import fingerprint, reach, rollup, self_check, text
from .blocks import Block, Heading, Lines, Paragraph, Strong, Table
from .values import Case, Contract, Evidence, Report, Waiver
from .verdicts import Verdict

_ROWS_SHOWN = 8
_CASES_SHOWN = 3

_BOUNDED = ("<=", ">=", "in")
_STATES = {
    "used": "in force, and needed",
    "expired": "EXPIRED: it no longer excuses anything",
    "unmatched": "MATCHES NO CASE: it must be removed",
    "unneeded": "NO LONGER NEEDED: a case that it names passes",
}


def blocks(report: Report) -> Iterator[Block]:
    """Yield the annex."""
    yield Heading(1, "Annex")
    yield Paragraph(
        "A contract is one promise about AMP; its verdict is the worst of its cases. Facts for information only "
        "are listed and never count. FAIL: it does not hold. WAIVED: it does not hold, and a written excuse says "
        "so. UNSUPPORTED: the device declares that it lacks this. UNTESTABLE: something needed was missing. "
        "INCONCLUSIVE: the measurement was too noisy to decide. ERROR: the suite itself broke."
    )
    yield from _environment(report)
    yield from _contracts(report)
    yield from _waivers(report)
    yield from _problems(report)


def _table(heads: tuple[str, ...], rows: Any) -> Table:
    return Table(heads, tuple(tuple(cell if isinstance(cell, str) else str(cell) for cell in row) for row in rows))


def _environment(report: Report) -> Iterator[Block]:
    header = report.header
    yield Heading(2, "A. What was judged, with what")
    suite = header.suite
    state = {True: "", False: ", WITH CHANGES THAT ARE NOT COMMITTED", None: ""}[suite.clean]
    environment = {name: value for name, value in vars(header.environment).items() if name != "packages"}
    options = {name: value for name, value in vars(header.options).items() if value not in (None, (), "")}
    rows: list[tuple[str, Any]] = [
        ("suite", f"version {suite.version}, commit {suite.commit or 'unknown'}{state}"),
        ("started", header.started),
        ("ended", _ended(report)),
        *((name.replace("_", " "), "none" if value is None else value) for name, value in environment.items()),
        *((f"package {name}", version) for name, version in header.environment.packages.items()),
        *((f"autocast kernels of {name}", reach.sources(files)) for name, files in header.autocast_kernels.items()),
        *((f"replaced by {name}", ", ".join(names)) for name, names in header.replaced_functions.items()),
        *((f"option {name.replace('_', ' ')}", value) for name, value in options.items()),
        *(header.flags.items()),
        *((f"variable {name}", value) for name, value in header.variables.items()),
        *((f"torch.backends.{name}", words) for name, words in reach.entries(header.torch_backends).items()),
    ]
    yield _table(("", ""), [(name, text.value(value)) for name, value in rows])
    for target in header.targets:
        kind = "fake: real dispatcher, no hardware" if target.fake else "real device"
        yield Paragraph(f"({kind}), probed:", f"Target {target.name}")
        if target.probe:
            yield _table(("capability", "found"), [(name, text.value(value)) for name, value in target.probe.items()])
    for health in report.footer.health if report.footer else ():
        yield Paragraph("as its driver counts:", f"Health of {health.target},")
        names = dict.fromkeys([*health.before, *health.after])
        counts = [[name, *(found.get(name, "-") for found in (health.before, health.after))] for name in names]
        counts.append(["critical errors (Xid) meanwhile", "", ", ".join(map(str, health.xids)) or "none"])
        yield _table(("", "before the run", "after it"), counts)
    for found in fingerprint.fingerprints(report).values():
        yield Paragraph("as measured:", f"Numerics fingerprint of {found.target},")
        arithmetic = [
            (section, row, value) for section, values in found.sections.items() for row, value in values.items()
        ]
        yield _table(("", "of the arithmetic", "found"), arithmetic)
    if report.footer and report.footer.self_check:
        check = report.footer.self_check
        yield Paragraph(f"{self_check.brief(check).capitalize()}, each broken AMP in this torch before the run:")
        faults = [
            (fault.summary, fault.target, ", ".join(fault.contracts), fault.state, fault.case or fault.reason)
            for fault in check.faults
        ]
        yield _table(("fault", "target", "contracts that have to notice", "", "by, or why not"), faults)


def _ended(report: Report) -> str:
    footer = report.footer
    return f"{footer.finished}, after {footer.duration_s:.0f} s" if footer else "it did not end"


def _contracts(report: Report) -> Iterator[Block]:
    yield Heading(2, "B. The contracts, measured against required")
    for chapter in report.header.chapters:
        yield Heading(3, chapter.title)
        yield Paragraph(chapter.summary)
        for contract in report.header.contracts:
            if contract.chapter == chapter.name:
                yield from _contract(report, contract)


def _contract(report: Report, contract: Contract) -> Iterator[Block]:
    cases = report.cases_of[contract.id]
    yield Heading(4, f"{contract.id}: {contract.title}")
    targets = text.some(list(dict.fromkeys(case.target for case in cases)), 6)
    ran = f"{text.count(len(cases), 'case')} on {targets}" if cases else "no case"
    yield Paragraph(f"({ran}; {contract.level}, {contract.authority}: {contract.source})", _words(report, contract))
    yield Paragraph(contract.statement)
    if rows := _measurements(cases):
        yield _table(("measured", "value", "required", "times"), rows[:_ROWS_SHOWN])
    if len(rows) > _ROWS_SHOWN:
        yield Paragraph(f"and {text.count(len(rows) - _ROWS_SHOWN, 'further measurement')} in the report.")
    if remarks := tuple(_remarks(cases)):
        yield Lines(remarks)


def _words(report: Report, contract: Contract) -> str:
    """Return the verdict of a contract, with the number of cases of each verdict where they differ."""
    cases = report.cases_of[contract.id]
    counted = Counter(case.verdict for case in cases)
    # A fact for information is recorded, not passed.
    words = {Verdict.PASS: "RECORDED" if contract.level == "info" else Verdict.PASS.value}
    verdict = rollup.contract_verdict(cases)
    if verdict is None:
        return "NOT REACHED"
    word = words.get(verdict, verdict.value)
    others = [other for other in reversed(Verdict) if counted[other] and other is not verdict]
    if not others:
        return word
    rest = ", ".join(f"{words.get(other, other.value)} in {counted[other]}" for other in others)
    return f"{word} in {counted[verdict]} of {text.count(len(cases), 'case')}, {rest}"


def _measurements(cases: list[Case]) -> list[list[str]]:
    """One row for each thing that was measured, what does not hold first; many cases share a row."""
    groups: dict[tuple[Any, ...], list[Evidence]] = {}
    for case in cases:
        for evidence in case.evidence:
            if evidence.unit == fingerprint.UNIT:
                continue  # it has a table of its own
            key = (evidence.holds, evidence.name, evidence.relation, evidence.unit)
            groups.setdefault(key, []).append(evidence)
    return [_row(found) for _, found in sorted(groups.items(), key=lambda item: item[0][0])]


def _row(found: list[Evidence]) -> list[str]:
    """The measurement nearest to its bound, or where there is no such distance the most frequent one."""
    pairs = Counter((evidence.measured, evidence.bound) for evidence in found)
    if found[0].relation in _BOUNDED:
        shown, word = min(found, key=_slack), "the nearest to its bound"
    else:
        shown = max(found, key=lambda evidence: pairs[evidence.measured, evidence.bound])
        word = "the most frequent"
    among = f" (of {len(found)}, {word})" if len(pairs) > 1 else ""
    return [
        shown.name if shown.holds else Strong(f"DOES NOT HOLD: {shown.name}"),
        text.value(shown.measured, shown.unit) + among,
        text.required(shown) or "(a fact, no bound)",
        str(len(found)),
    ]


def _slack(evidence: Evidence) -> float:
    """How far a number is from its bound, relative to the bound; 0 where it is no number."""
    bounds = evidence.bound if isinstance(evidence.bound, tuple) else (evidence.bound,)
    try:
        # Numbers that are not finite stand as texts in a report.
        measured, *numbers = (float(number) for number in (evidence.measured, *bounds))
    except (TypeError, ValueError):
        return 0.0
    if math.isnan(measured):
        return 0.0
    return min(abs(bound - measured) / (abs(bound) or 1.0) for bound in numbers)


def _remarks(cases: list[Case]) -> Iterator[str]:
    """What is to be said of a contract's cases that did not pass."""
    for verdict in reversed(Verdict):
        if verdict is Verdict.PASS:
            continue
        found = [case for case in cases if case.verdict is verdict]
        for case in found[:_CASES_SHOWN]:
            said = text.sighting(case)
            waived = f". Waived: {case.waiver}" if case.waiver else ""
            yield f"{verdict.value}: {case.id} on {case.target}: {said}{waived}"
        if len(found) > _CASES_SHOWN:
            yield f"{verdict.value}: and {text.count(len(found) - _CASES_SHOWN, 'more case')}"


def _waivers(report: Report) -> Iterator[Block]:
    yield Heading(2, "C. What was waived")
    waived = [case for case in report.cases if case.verdict is Verdict.WAIVED]
    waivers = report.footer.waivers if report.footer else ()
    if report.header.options.no_waivers:
        yield Paragraph("Waivers were ignored (--no-waivers).")
    if not waived and not waivers:
        yield Paragraph("Nothing.")
        return
    ids = list(dict.fromkeys(case.contract for case in waived))
    excused = f"{text.count(len(waived), 'case')} of {text.count(len(ids), 'contract')}" if waived else "nothing"
    yield Paragraph(f"Excused although it does not hold: {excused}.")
    if waived and not waivers:
        yield Paragraph("The run did not end, so only the reasons are known: they stand with the contracts above.")
    called_upon = [waiver for waiver in waivers if waiver.state in _STATES]
    for waiver in sorted(called_upon, key=lambda waiver: list(_STATES).index(waiver.state)):
        yield _waiver(waiver)
    if idle := [waiver.contract for waiver in waivers if waiver.state == "idle"]:
        of = ", ".join(dict.fromkeys(idle))
        yield Paragraph(f"Not called upon in this run: {text.count(len(idle), 'waiver')}, of {of}.")


def _waiver(waiver: Waiver) -> Table:
    rows = [
        ("contract", waiver.contract),
        ("cases", ", ".join(waiver.cases)),
        ("reason", waiver.reason),
        ("owner", waiver.owner),
        ("link", waiver.link),
        ("ends", waiver.expires),
        ("state", f"{_STATES[waiver.state]}; names {text.count(waiver.matched, 'case')} of this run"),
    ]
    return _table(("waiver", ""), rows)


def narrowed(report: Report) -> Iterator[str]:
    """Yield how the run was narrowed by whoever started it."""
    options = report.header.options
    if narrowing := text.narrowing(options):
        yield f"The run was narrowed by {narrowing}: nothing beyond that was judged."
    if options.amp_dtype != "both":
        yield f"Only {options.amp_dtype} was judged, not the other AMP dtype."
    if options.level != "full":
        yield f"The depth was {options.level}; deeper levels run more cases of the same contracts."
    if all(target.fake or target.device_type == "cpu" for target in report.header.targets):
        yield "No accelerator was judged: the targets are the CPU or fake ones."


def _problems(report: Report) -> Iterator[Block]:
    footer = report.footer
    rows = list(footer.problems) if footer else []
    if footer and footer.baseline:
        path = footer.baseline.path
        rows += [f"passed in {path}, not here: {id}" for id in footer.baseline.regressed]
        rows += [f"passed in {path}, gone here: {id}" for id in footer.baseline.gone]
        if not footer.baseline.regressed and not footer.baseline.gone:
            rows.append(f"compared with {path}: nothing that passed there is worse here")
    if rows:
        yield Heading(2, "D. Problems of the run, and comparison with an earlier one")
        yield Lines(tuple(rows))
