"""What a report says twice: evidence against its bounds, verdicts against evidence, the footer against the records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from . import rollup
from .values import Case, Evidence, Footer, Report, Waiver
from .verdicts import Overall, Verdict

_NUMBERED = ("<=", ">=", "in")
_NOTHING = {"raises": "nothing was raised", "warns": "no warning"}
# A case whose evidence does not hold has failed, is excused, or broke down afterwards.
_BROKEN = (Verdict.FAIL, Verdict.WAIVED, Verdict.ERROR)


def digest(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a report (of json.loads) without its own digest, whatever its order of keys and blanks.

    It shows that a report was edited or damaged; a forger can compute it as well.
    """
    footer = {key: value for key, value in document["footer"].items() if key != "digest"}
    whole = json.dumps({**document, "footer": footer}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(whole.encode()).hexdigest()


def contradictions(report: Report) -> Iterator[str]:
    """Yield, a line each, what the report says of itself that cannot all be true; nothing for what a run wrote."""
    targets = {target.name for target in report.header.targets} | {"host"}
    for case in report.cases:
        yield from of_case(report, case, targets)
    if report.footer is not None:
        yield from _of_totals(report, report.footer)
        yield from _of_contracts(report, report.footer)
        yield from _of_waivers(report, report.footer)
        yield from _of_self_check(report, report.footer, targets)
        yield from _of_unreached(report, report.footer, targets)
        yield from _of_ending(report, report.footer)


def of_case(report: Report, case: Case, targets: set[str]) -> Iterator[str]:
    """Yield what a case says of itself that cannot all be true; `targets` are the names that a case may name."""
    for evidence in case.evidence:
        if (why := _wrong(evidence)) is not None:
            yield f"the case {case.id} says of its {evidence.name!r} that it {why}"
    broken = next((evidence for evidence in case.evidence if not evidence.holds), None)
    if broken is not None and case.verdict not in _BROKEN:
        comes = "passes" if case.verdict is Verdict.PASS else f"is {case.verdict.value}"
        yield f"the case {case.id} {comes} although its {broken.name!r} does not hold"
    if case.verdict is Verdict.PASS and case.reason:
        yield f"the case {case.id} passes although: {case.reason}"
    informs = report.contracts[case.contract].level == "info"
    if case.verdict is Verdict.PASS and not any(evidence.judged or informs for evidence in case.evidence):
        yield f"the case {case.id} passes without judged evidence"
    # A test that skips itself need not say why.
    if case.verdict not in (Verdict.PASS, Verdict.UNTESTABLE) and not case.reason:
        yield f"the case {case.id} is {case.verdict.value} and gives no reason"
    if (case.verdict is Verdict.WAIVED) != (case.waiver is not None):
        yield f"the case {case.id} is {case.verdict.value} with {'the' if case.waiver else 'no'} reason of a waiver"
    if case.verdict is Verdict.WAIVED and report.header.options.no_waivers:
        yield f"the case {case.id} is WAIVED in a run that ignored waivers"
    if case.target not in targets:
        yield f"the case {case.id} ran on {case.target!r}, which is no target of the run"
    if not case.id.startswith(f"{case.contract}["):
        yield f"the case {case.id} is filed under the contract {case.contract}"


def _wrong(evidence: Evidence) -> str | None:
    """What is wrong with the claim that evidence holds, or that it does not; None where it can be true."""
    measured, bound, holds = evidence.measured, evidence.bound, evidence.holds
    if evidence.relation is None:
        return None if holds and bound is None else "does not hold, or has a bound, and nothing was required of it"
    if evidence.relation in _NUMBERED:
        found = _keeps(measured, evidence.relation, bound)
        if found is None:
            return f"was held against {bound!r} by {evidence.relation!r}, which is no bound of {measured!r}"
        return None if found is holds else _denial(evidence)
    if evidence.relation in _NOTHING:
        return _denial(evidence) if holds and measured == _NOTHING[evidence.relation] else None
    if evidence.relation == "identical":
        return None if (measured == bound) is holds else _denial(evidence)
    # NaN is not NaN, and objects that differ may read alike: what does not hold is believed.
    return _denial(evidence) if holds and not alike(measured, bound) else None


def _denial(evidence: Evidence) -> str:
    said = "holds" if evidence.holds else "does not hold"
    return f"{said}, with {evidence.measured!r} against {evidence.relation} {evidence.bound!r}"


def _keeps(measured: Any, relation: str, bound: Any) -> bool | None:
    """Whether a number keeps to its bound; None where one of them is no number."""
    bounds = bound if relation == "in" and isinstance(bound, tuple) else (bound,)
    numbers = [_number(value) for value in (measured, *bounds)]
    if len(numbers) != (3 if relation == "in" else 2) or None in numbers:
        return None
    value, low, high = (*numbers, numbers[-1])[:3]
    assert value is not None
    assert low is not None
    assert high is not None
    return {"<=": value <= low, ">=": value >= low, "in": low <= value <= high}[relation]


def _number(value: Any) -> float | None:
    """A number of a report, in which those that are not finite stand as texts."""
    if value in ("nan", "inf", "-inf"):
        return math.nan if value == "nan" else math.inf if value == "inf" else -math.inf
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def alike(one: Any, other: Any) -> bool:
    """Return whether values that were equal in Python can read so: tables come in any order, fractions as texts."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and (
            all(map(alike, one, other)) or sorted(map(str, one)) == sorted(map(str, other))
        )
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other) or str(one) == str(other)


def _of_totals(report: Report, footer: Footer) -> Iterator[str]:
    totals = {verdict: count for verdict, count in footer.totals.items() if count}
    if totals != (derived := rollup.totals(report)):
        yield f"the footer counts {_counts(totals)}, the records come to {_counts(derived)}"


def _of_contracts(report: Report, footer: Footer) -> Iterator[str]:
    for id in sorted(set(footer.contracts) ^ set(report.contracts)):
        yield f"the contract {id} is in only one of header and footer"
    for id, verdict in rollup.verdicts(report).items():
        if (claimed := footer.contracts.get(id)) is None:
            continue
        cases = report.cases_of[id]
        if claimed.verdict is not verdict:
            yield f"the footer says {_word(claimed.verdict)} of {id}, its cases come to {_word(verdict)}"
        if claimed.cases != len(cases):
            yield f"the footer counts {claimed.cases} cases of {id}, there are {len(cases)}"
        reasons = {case.reason for case in cases if case.verdict is verdict}
        if reasons and claimed.reason not in reasons:
            yield f"the footer gives a reason for {id} that none of its cases gives"


def _of_waivers(report: Report, footer: Footer) -> Iterator[str]:
    named = [(waiver, _named(report, waiver)) for waiver in footer.waivers]
    for waiver, cases in named:
        verdicts = {case.verdict for case in cases}
        what = f"the waiver of {waiver.contract} ({', '.join(waiver.cases)})"
        if not (waiver.state in ("used", "unneeded")) <= waiver.matched <= len(cases):
            yield f"{what} is said to be {waiver.state} and to match {waiver.matched} cases, and names {len(cases)}"
        for state, verdict in (("used", Verdict.WAIVED), ("unneeded", Verdict.PASS)):
            if waiver.state == state and verdict not in verdicts:
                yield f"{what} is said to be {state}, and none of its cases is {verdict.value}"
        # A waiver may end during the run, at midnight.
        begun, ended = report.header.started[:10], footer.finished[:10]
        if waiver.expires >= ended if waiver.state == "expired" else waiver.expires < begun:
            yield f"{what} is said to be {waiver.state}, and ends on {waiver.expires}; the run was on {begun}"
    for case in report.cases:
        if case.verdict is Verdict.WAIVED and not any(
            case in cases and waiver.reason == case.waiver and waiver.state not in ("idle", "unmatched")
            for waiver, cases in named
            if waiver.contract == case.contract
        ):
            yield f"the case {case.id} is WAIVED, and no waiver of the footer excuses it"


def _named(report: Report, waiver: Waiver) -> list[Case]:
    # A case id holds brackets, which fnmatch would read as a character set.
    patterns = [pattern.replace("[", "[[]") for pattern in waiver.cases]
    cases = report.cases_of.get(waiver.contract, [])
    return [case for case in cases if any(fnmatchcase(case.id, pattern) for pattern in patterns)]


def _of_self_check(report: Report, footer: Footer, targets: set[str]) -> Iterator[str]:
    for fault in footer.self_check.faults if footer.self_check else ():
        what = f"the planted fault {fault.name} on {fault.target}"
        if fault.target not in targets:
            yield f"{what} was on no target of the run"
        if (fault.state == "caught") != (fault.case is not None):
            yield f"{what} is said to be {fault.state}, noticed by {fault.case or 'nothing'}"
        if (fault.state == "caught") == bool(fault.reason):
            yield f"{what} is said to be {fault.state}, with {'a' if fault.reason else 'no'} reason why not"
        if fault.case is not None:
            contract = fault.case.split("[")[0]
            if contract not in fault.contracts or contract not in report.contracts:
                yield f"{what} is said to be noticed by {fault.case}, which is no case of a contract that has to"


def _of_unreached(report: Report, footer: Footer, targets: set[str]) -> Iterator[str]:
    for target, ids in footer.unreached.items():
        if target not in targets:
            yield f"{target!r} is said to have contracts without a case, and is no target of the run"
        for id in ids:
            if id not in report.contracts:
                yield f"the contract {id} is said to have no case on {target}, and is none of the run"
            elif any(case.target == target for case in report.cases_of[id]):
                yield f"the contract {id} is said to have no case on {target}, and has one"


def _of_ending(report: Report, footer: Footer) -> Iterator[str]:
    overall = rollup.overall(report)
    if footer.overall is not overall:
        yield f"the footer says {footer.overall.value}, the records come to {overall.value}"
        return
    # 2 says interrupted; 4 that pytest could not use a part of its command line.
    allowed = {
        Overall.INCOMPLETE: {2},
        Overall.NOT_CONFORMANT: {1, 3, 4, 5},
        Overall.NOTHING_RAN: {3, 4, 5},
        Overall.INCONCLUSIVE: {6, 4} if report.header.options.require_conclusive else {0, 4},
        Overall.PARTIAL: {6, 4},
        Overall.CONFORMANT: {0, 4},
    }[overall]
    if footer.exit_status not in allowed:
        yield f"the exit status {footer.exit_status} is not that of a run that is {overall.value}"


def _counts(totals: dict[Verdict, int]) -> str:
    return ", ".join(f"{count} {verdict.value}" for verdict, count in totals.items()) or "nothing"


def _word(verdict: Verdict | None) -> str:
    return "not reached" if verdict is None else verdict.value
