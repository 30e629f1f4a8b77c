"""The acceptance checklist: a run as a Markdown document that a buyer can read without this suite, and sign."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from . import fingerprint, rollup, self_check, text
from .values import Case, Contract, Evidence, Health, Report, SelfCheck, Target, Waiver
from .verdicts import Overall, Verdict

_ROWS_SHOWN = 8
_CASES_SHOWN = 3

_BOUNDED = ("<=", ">=", "in")

_MEANING = {
    Overall.CONFORMANT: "Every contract that was judged holds, apart from those that are waived below.",
    Overall.NOT_CONFORMANT: "At least one contract does not hold, or the run itself is at fault; see below.",
    Overall.INCONCLUSIVE: "No contract was seen to fail, but at least one could not be judged, or the self-check "
    "missed a planted fault. This is no pass.",
    Overall.INCOMPLETE: "The run did not come to its end. Nothing here is a pass, whatever single contracts say.",
}
_STATES = {
    "used": "in force, and needed",
    "expired": "EXPIRED: it no longer excuses anything",
    "unmatched": "MATCHES NO CASE: it must be removed",
    "unneeded": "NO LONGER NEEDED: a case that it names passes",
}


def render(report: Report, *, digest: str | None = None) -> str:
    """Return the checklist of `report` in Markdown; `digest` is the SHA-256 of the report's file."""
    parts = [
        *_summary(report, digest),
        *_environment(report),
        *_contracts(report),
        *_waivers(report),
        *_not_run(report),
        *_problems(report),
        *_signatures(report, digest),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(report: Report, digest: str | None) -> Iterator[str]:
    overall = rollup.overall(report)
    yield "# Acceptance of automatic mixed precision (AMP)"
    yield f"**Verdict: {overall.value}.** {_MEANING[overall]}"
    rows = []
    for chapter in report.header.chapters:
        ids = [id for id, contract in report.contracts.items() if contract.chapter == chapter.name]
        verdicts = [rollup.contract_verdict(report.cases_of[id]) for id in ids]
        rows.append([text.markdown(chapter.title), len(ids), *_tally(verdicts)])
    all_verdicts = list(rollup.verdicts(report).values())
    rows.append(["**all**", len(all_verdicts), *_tally(all_verdicts)])
    yield _table(["chapter", "contracts", *(verdict.value for verdict in Verdict), "not reached"], rows)
    if partly := _partly(report):
        yield f"In part only, because other cases of the same contract came to another verdict: {partly} (section 2)."
    yield (
        "A contract is one promise about AMP; its verdict is the worst of its cases. Facts for information only "
        "are listed and never count. FAIL: it does not hold. WAIVED: it does not hold, and a written excuse says "
        "so. UNSUPPORTED: the device declares that it lacks this. UNTESTABLE: something needed was missing. "
        "INCONCLUSIVE: the measurement was too noisy to decide. ERROR: the suite itself broke."
    )
    failing = [f"- {text.markdown(id)}: {text.markdown(report.contracts[id].title)}" for id in rollup.failing(report)]
    if failing:
        yield "What makes the machine not conformant:\n\n" + "\n".join(failing)
    if digest:
        yield f"This document was made from the report with the SHA-256 `{digest}`."


def _partly(report: Report) -> str:
    """Of how many contracts of each verdict some cases pass; empty where verdicts are those of all cases."""
    verdicts = rollup.verdicts(report)
    counted = Counter(verdicts[id] for id, cases in report.cases_of.items() if rollup.in_part(cases))
    every = list(verdicts.values())
    return ", ".join(
        f"{counted[verdict]} of the {every.count(verdict)} {verdict.value}" for verdict in Verdict if counted[verdict]
    )


def _tally(verdicts: list[Verdict | None]) -> list[int]:
    return [*(verdicts.count(verdict) for verdict in Verdict), verdicts.count(None)]


def _table(headers: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table; the cells are Markdown already."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _environment(report: Report) -> Iterator[str]:
    header = report.header
    yield "## 1. What was judged, with what"
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
        *((f"option {name.replace('_', ' ')}", value) for name, value in options.items()),
        *(header.flags.items()),
        *((f"variable {name}", value) for name, value in header.variables.items()),
    ]
    yield _table(["", ""], [[text.markdown(name), text.markdown(text.value(value))] for name, value in rows])
    for target in header.targets:
        yield _target(target)
    for health in report.footer.health if report.footer else ():
        yield from _health(health)
    for found in fingerprint.fingerprints(report).values():
        yield from _fingerprint(found)
    if report.footer and report.footer.self_check:
        yield from _self_check(report.footer.self_check)


def _health(health: Health) -> Iterator[str]:
    yield f"Health of **{text.markdown(health.target)}**, as its driver counts:"
    names = dict.fromkeys([*health.before, *health.after])
    rows = [
        [text.markdown(name), *(counts.get(name, "-") for counts in (health.before, health.after))] for name in names
    ]
    rows.append(["critical errors (Xid) meanwhile", "", ", ".join(map(str, health.xids)) or "none"])
    yield _table(["", "before the run", "after it"], rows)


def _self_check(check: SelfCheck) -> Iterator[str]:
    yield f"{text.markdown(self_check.brief(check).capitalize())}, each broken AMP in this torch before the run:"
    rows = [
        [text.markdown(cell) for cell in (fault.summary, fault.target, ", ".join(fault.contracts), fault.state)]
        + [text.markdown(fault.case or fault.reason)]
        for fault in check.faults
    ]
    yield _table(["fault", "target", "contracts that have to notice", "", "by, or why not"], rows)


def _fingerprint(found: fingerprint.Fingerprint) -> Iterator[str]:
    yield f"Numerics fingerprint of **{text.markdown(found.target)}**, as measured:"
    rows = [(section, row, value) for section, values in found.sections.items() for row, value in values.items()]
    yield _table(["", "of the arithmetic", "found"], [[text.markdown(cell) for cell in row] for row in rows])


def _ended(report: Report) -> str:
    footer = report.footer
    return f"{footer.finished}, after {footer.duration_s:.0f} s" if footer else "it did not end"


def _target(target: Target) -> str:
    kind = "fake: real dispatcher, no hardware" if target.fake else "real device"
    heading = f"Target **{text.markdown(target.name)}** ({kind}), probed:"
    rows = [[text.markdown(name), text.markdown(text.value(value))] for name, value in target.probe.items()]
    return f"{heading}\n\n{_table(['capability', 'found'], rows)}" if rows else f"{heading} nothing."


def _contracts(report: Report) -> Iterator[str]:
    yield "## 2. The contracts"
    for chapter in report.header.chapters:
        yield f"### {text.markdown(chapter.title)}"
        yield text.markdown(chapter.summary)
        for contract in report.header.contracts:
            if contract.chapter == chapter.name:
                yield from _contract(report, contract)


def _contract(report: Report, contract: Contract) -> Iterator[str]:
    cases = report.cases_of[contract.id]
    yield f"#### {text.markdown(contract.id)}: {text.markdown(contract.title)}"
    targets = text.some(list(dict.fromkeys(case.target for case in cases)), 6)
    ran = f"{text.count(len(cases), 'case')} on {text.markdown(targets)}" if cases else "no case"
    source = f"{contract.authority}: {text.markdown(contract.source)}"
    yield f"**{_words(report, contract)}** ({ran}; {contract.level}, {source})"
    yield text.markdown(contract.statement)
    if rows := _measurements(cases):
        yield _table(["measured", "value", "required", "times"], rows[:_ROWS_SHOWN])
    if len(rows) > _ROWS_SHOWN:
        yield f"and {text.count(len(rows) - _ROWS_SHOWN, 'further measurement')} in the report."
    remarks = list(_remarks(cases))
    if remarks:
        yield "\n".join(remarks)


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
    mark = "" if shown.holds else "**DOES NOT HOLD:** "
    return [
        mark + text.markdown(shown.name),
        text.markdown(text.value(shown.measured, shown.unit)) + among,
        text.markdown(text.required(shown)) or "(a fact, no bound)",
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
            yield f"- {verdict.value}: {text.markdown(case.id)} on {text.markdown(case.target)}: {_said(case)}"
        if len(found) > _CASES_SHOWN:
            yield f"- {verdict.value}: and {text.count(len(found) - _CASES_SHOWN, 'more case')}"


def _said(case: Case) -> str:
    seen = text.markdown(text.sighting(case))
    return f"{seen}. Waived: {text.markdown(case.waiver)}" if case.waiver else seen


def _waivers(report: Report) -> Iterator[str]:
    yield "## 3. What was waived"
    waived = [case for case in report.cases if case.verdict is Verdict.WAIVED]
    waivers = report.footer.waivers if report.footer else ()
    if report.header.options.no_waivers:
        yield "Waivers were ignored (`--no-waivers`)."
    if not waived and not waivers:
        yield "Nothing."
        return
    ids = list(dict.fromkeys(case.contract for case in waived))
    excused = f"{text.count(len(waived), 'case')} of {text.count(len(ids), 'contract')}" if waived else "nothing"
    yield f"Excused although it does not hold: {excused}."
    if waived and not waivers:
        yield "The run did not end, so only the reasons are known: they stand with the contracts above."
    called_upon = [waiver for waiver in waivers if waiver.state in _STATES]
    for waiver in sorted(called_upon, key=lambda waiver: list(_STATES).index(waiver.state)):
        yield _waiver(waiver)
    if idle := [waiver.contract for waiver in waivers if waiver.state == "idle"]:
        of = text.markdown(", ".join(dict.fromkeys(idle)))
        yield f"Not called upon in this run: {text.count(len(idle), 'waiver')}, of {of}."


def _waiver(waiver: Waiver) -> str:
    rows = [
        ("contract", waiver.contract),
        ("cases", ", ".join(waiver.cases)),
        ("reason", waiver.reason),
        ("owner", waiver.owner),
        ("link", waiver.link),
        ("ends", waiver.expires),
        ("state", f"{_STATES[waiver.state]}; names {text.count(waiver.matched, 'case')} of this run"),
    ]
    return _table(["waiver", ""], [[name, text.markdown(value)] for name, value in rows])


def _not_run(report: Report) -> Iterator[str]:
    yield "## 4. What was not run, and why"
    rows = [*_narrowed(report), *_missing(report), *_not_applicable(report), *_spoiled(report)]
    yield "\n".join(f"- {row}" for row in rows) or "Everything was run."


def _narrowed(report: Report) -> Iterator[str]:
    """How the run was narrowed by whoever started it."""
    options = report.header.options
    if narrowing := text.narrowing(options):
        yield f"The run was narrowed by {text.markdown(narrowing)}: nothing beyond that was judged."
    if options.amp_dtype != "both":
        yield f"Only {text.markdown(options.amp_dtype)} was judged, not the other AMP dtype."
    if options.level != "full":
        yield f"The depth was {text.markdown(options.level)}; deeper levels run more cases of the same contracts."
    if all(target.fake or target.device_type == "cpu" for target in report.header.targets):
        yield "No accelerator was judged: the targets are the CPU or fake ones."


def _missing(report: Report) -> Iterator[str]:
    for id, cases in report.cases_of.items():
        if not cases:
            result = report.footer.contracts.get(id) if report.footer else None
            reason = result.reason if result else "the run did not get that far"
            title = text.markdown(report.contracts[id].title)
            yield f"NOT REACHED: {text.markdown(id)}, {title}: {text.markdown(reason)}"


def _not_applicable(report: Report) -> Iterator[str]:
    for reason, contracts in rollup.not_applicable(report).items():
        ids = ", ".join(dict.fromkeys(text.markdown(contract) for contract in contracts))
        yield f"NOT APPLICABLE HERE: {text.markdown(reason)}: {text.count(len(contracts), 'case')} of {ids}"


def _spoiled(report: Report) -> Iterator[str]:
    for verdict in (Verdict.UNSUPPORTED, Verdict.UNTESTABLE, Verdict.INCONCLUSIVE):
        reasons: dict[str, list[Case]] = {}
        for case in report.cases:
            if case.verdict is verdict:
                reasons.setdefault(text.line(case.reason), []).append(case)
        for reason, cases in reasons.items():
            ids = ", ".join(dict.fromkeys(text.markdown(case.contract) for case in cases))
            why = text.markdown(reason) or "no reason is given"
            yield f"{verdict.value}: {why}: {text.count(len(cases), 'case')} of {ids}"


def _problems(report: Report) -> Iterator[str]:
    footer = report.footer
    rows = [text.markdown(problem) for problem in footer.problems] if footer else []
    if footer and footer.baseline:
        path = text.markdown(footer.baseline.path)
        rows += [f"passed in {path}, not here: {text.markdown(id)}" for id in footer.baseline.regressed]
        rows += [f"passed in {path}, gone here: {text.markdown(id)}" for id in footer.baseline.gone]
        if not footer.baseline.regressed and not footer.baseline.gone:
            rows.append(f"compared with {path}: nothing that passed there is worse here")
    if rows:
        yield "## 5. Problems of the run, and comparison with an earlier one"
        yield "\n".join(f"- {row}" for row in rows)


def _signatures(report: Report, digest: str | None) -> Iterator[str]:
    yield "## Signatures"
    overall = rollup.overall(report).value
    torch = text.markdown(report.header.environment.torch)
    targets = text.markdown(", ".join(target.name for target in report.header.targets))
    file = f", from the report with the SHA-256 `{digest}`" if digest else ""
    yield f"For the verdict **{overall}** of torch {torch} on {targets}{file}:"
    yield _table(
        ["", "name", "date", "signature"],
        [[who, "_" * 24, "_" * 12, "_" * 24] for who in ("for the supplier", "for the buyer")],
    )
