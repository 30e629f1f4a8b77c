"""What a buyer has to know besides the verdict: what was waived, left out or not run, and who judged.

Each remark says whether `verify --complete` accepts it.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .. import data
from . import rollup, text
from .values import Contract, Report, Suite, Waiver
from .verdicts import Overall, Verdict

DEPTHS = ("quick", "standard", "full")
_NAMED = 5


@dataclass(frozen=True)
class Listed:
    """A contract of the catalogue, with the torch versions that it is in force for and what it needs of the user."""

    contract: Contract
    since: str | None
    until: str | None
    needs: str | None


@dataclass(frozen=True)
class Terms:
    """What a buyer asks of a run: the least depth and an accelerator; and which waivers and gaps are accepted.

    `suite` is the suite that checks; `catalogue` its contracts, None where they cannot be read here. `waivers` holds
    the keys of waivers (`key`), `contracts` the ids of contracts that need not be judged.
    """

    suite: Suite
    catalogue: Mapping[str, Listed] | None
    level: str = "standard"
    accelerator: bool = True
    waivers: Collection[tuple[str, ...]] = ()
    contracts: Collection[str] = ()


@dataclass(frozen=True)
class Remark:
    """A fact that a buyer has to know; `accepted` where it keeps no run from being complete."""

    words: str
    accepted: bool


def remarks(report: Report, terms: Terms) -> list[Remark]:
    """Return what limits the verdict of `report`, what is not accepted first."""
    found = [
        *_of_verdict(report),
        *_of_suite(report, terms),
        *_of_selection(report, terms),
        *_of_catalogue(report, terms),
        *_of_waivers(report, terms),
        *_of_cases(report, terms),
    ]
    return sorted(found, key=lambda remark: remark.accepted)


def unaccounted(report: Report, terms: Terms) -> list[str]:
    """Return what contradicts the catalogue that the run judged by; nothing where this suite has another catalogue."""
    if terms.catalogue is None or report.header.suite.catalogue != terms.suite.catalogue:
        return []
    problems = []
    for id, listed in terms.catalogue.items():
        said = report.contracts.get(id)
        if said is None and not _excused(report, listed):
            problems.append(f"the contract {id} of the catalogue is not accounted for: neither judged nor left out")
        elif said is not None and _stated(said) != _stated(listed.contract):
            problems.append(f"the contract {id} is not stated as in the catalogue")
    problems += [f"the contract {id} is not in the catalogue" for id in report.contracts if id not in terms.catalogue]
    return problems


def _excused(report: Report, listed: Listed) -> bool:
    """Whether the options or the version of torch explain why a run has nothing on a contract."""
    options = report.header.options
    narrowed = bool(options.chapters or options.contracts or options.selection)
    return narrowed or listed.needs is not None or not _in_force(report, listed)


def _in_force(report: Report, listed: Listed) -> bool:
    return data.in_force(report.header.environment.torch, listed.since, listed.until)


def _stated(contract: Contract) -> tuple[str, ...]:
    """Return a contract without its advice, which a report may omit."""
    return (
        contract.id,
        contract.chapter,
        contract.title,
        contract.statement,
        contract.level,
        contract.authority,
        contract.source,
    )


def key(
    contract: str, cases: Iterable[str], reason: str, owner: str, link: str, expires: datetime.date | str
) -> tuple[str, ...]:
    """Return what makes two waivers the same one, whatever became of them in a run."""
    return tuple(map(str, (contract, *cases, reason, owner, link, expires)))


def _key(waiver: Waiver) -> tuple[str, ...]:
    return key(waiver.contract, waiver.cases, waiver.reason, waiver.owner, waiver.link, waiver.expires)


def _of_verdict(report: Report) -> Iterator[Remark]:
    found = rollup.overall(report)
    if found is not Overall.CONFORMANT:
        failing = list(rollup.failing(report))
        why = f": {text.some(failing, _NAMED)}" if failing else ""
        yield Remark(f"the run is {found.value}{why}", False)
    if report.footer is not None and report.footer.digest is None:
        yield Remark("the report has no digest, so an edit that contradicts nothing would not be seen", False)


def _of_suite(report: Report, terms: Terms) -> Iterator[Remark]:
    suite = report.header.suite
    if suite.clean is False:
        yield Remark("the suite that judged had changes that are not committed", False)
    if suite.digest is None:
        yield Remark("the report does not say which files of the suite judged", False)
    elif suite.digest != terms.suite.digest:
        yield Remark(
            f"the files of the suite that judged ({_suite(suite)}) are not those of the suite that checks "
            f"({_suite(terms.suite)})",
            False,
        )


def _suite(suite: Suite) -> str:
    return f"version {suite.version}, digest {(suite.digest or 'unknown')[:12]}"


def _of_selection(report: Report, terms: Terms) -> Iterator[Remark]:
    options = report.header.options
    if narrowing := text.narrowing(options):
        yield Remark(f"narrowed by {narrowing}: nothing beyond that was judged", False)
    if options.amp_dtype != "both":
        yield Remark(f"only {options.amp_dtype} was judged, not the other AMP dtype", False)
    if options.level != DEPTHS[-1]:
        enough = options.level in DEPTHS and DEPTHS.index(options.level) >= DEPTHS.index(terms.level)
        yield Remark(f"the depth was {options.level}; deeper levels run more cases of the same contracts", enough)
    if all(target.fake or target.device_type == "cpu" for target in report.header.targets):
        yield Remark("no accelerator was judged: the targets are the CPU or fake ones", not terms.accelerator)


def _of_catalogue(report: Report, terms: Terms) -> Iterator[Remark]:
    catalogue = report.header.suite.catalogue
    if terms.catalogue is None:
        yield Remark("the contracts were not counted: the catalogue of this suite cannot be read here", False)
        return
    if catalogue != terms.suite.catalogue:
        said = f"catalogue {catalogue[:12]}" if catalogue else "a catalogue that the report does not name"
        mine = (terms.suite.catalogue or "unknown")[:12]
        yield Remark(f"judged by {said}, and this suite has {mine}: the contracts were not counted", False)
        return
    left = [listed for id, listed in terms.catalogue.items() if id not in report.contracts]
    gone = [listed.contract.id for listed in left if not _in_force(report, listed)]
    if gone:
        yield Remark(f"not in force on torch {report.header.environment.torch}: {_of(gone)}", True)
    if own := [listed.contract.id for listed in left if listed.needs is not None and _in_force(report, listed)]:
        yield Remark(f"left out, as they judge a model of the user's own (--workload): {_of(own)}", True)


def _of_waivers(report: Report, terms: Terms) -> Iterator[Remark]:
    used = [waiver for waiver in (report.footer.waivers if report.footer else ()) if waiver.state == "used"]
    shipped = [waiver for waiver in used if _key(waiver) in terms.waivers]
    if shipped:
        by = {(waiver.contract, waiver.reason) for waiver in shipped}
        cases = sum(case.verdict is Verdict.WAIVED and (case.contract, case.waiver) in by for case in report.cases)
        of = _of(waiver.contract for waiver in shipped)
        yield Remark(f"waived, as accepted: {text.count(cases, 'case')} of {of}", True)
    for waiver in used:
        if waiver not in shipped:
            yield Remark(
                f"waived beyond what is accepted: {text.count(waiver.matched, 'case')} of {waiver.contract}, by "
                f"{text.line(waiver.owner)}: {text.line(waiver.reason)}",
                False,
            )


def _of_cases(report: Report, terms: Terms) -> Iterator[Remark]:
    yield from _not_reached(report, terms)
    for verdict in (Verdict.UNTESTABLE, Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED):
        cases = [case for case in report.cases if case.verdict is verdict]
        # A fact for information is no promise, so a run is complete without it.
        needed = [
            case
            for case in cases
            if verdict is not Verdict.UNSUPPORTED
            and report.contracts[case.contract].level != "info"
            and case.contract not in terms.contracts
        ]
        some = [case for case in cases if case not in needed]
        for found, accepted in ((needed, False), (some, True)):
            if found:
                counted = Counter(text.line(case.reason) for case in found).most_common()
                others = f" (and {text.count(len(counted) - 1, 'other reason')})" * (len(counted) > 1)
                words = f"{verdict.value}: {text.count(len(found), 'case')} of {_of(case.contract for case in found)}"
                yield Remark(f"{words}: {counted[0][0] or 'no reason is given'}{others}", accepted)
    for reason, ids in rollup.not_applicable(report).items():
        yield Remark(f"not applicable here: {text.count(len(ids), 'case')} of {_of(ids)}: {text.line(reason)}", True)


def _not_reached(report: Report, terms: Terms) -> Iterator[Remark]:
    """Say which contracts have no case, by reason; another kind of target and a deeper level are good reasons."""
    reasons: dict[tuple[str, bool], list[str]] = {}
    for id, cases in report.cases_of.items():
        if not cases:
            said = report.footer.contracts.get(id) if report.footer else None
            reason = text.line(said.reason) if said else "the run did not get that far"
            informs = report.contracts[id].level == "info"
            good = informs or id in terms.contracts or reason.startswith(rollup.OTHER_TARGET) or _deeper(reason, terms)
            reasons.setdefault((reason, good), []).append(id)
    for (reason, good), ids in reasons.items():
        yield Remark(f"not reached: {text.count(len(ids), 'contract')}, {_of(ids)}: {reason}", good)


def _deeper(reason: str, terms: Terms) -> bool:
    """Whether a contract was not reached because it belongs to a deeper level than the terms ask for."""
    level = reason.removeprefix(rollup.DEEPER)
    return level != reason and level in DEPTHS and DEPTHS.index(level) > DEPTHS.index(terms.level)


def _of(ids: Iterable[str]) -> str:
    """Name the first contracts of `ids`, each once."""
    return text.some(list(dict.fromkeys(ids)), _NAMED)
