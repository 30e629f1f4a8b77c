"""The outline of a run that every view shows: the verdict with its grounds, failures, chapters, what was not run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..invocation import RUN
from . import reach, reasons, rollup, text
from .reasons import Reason
from .values import Case, Chapter, Contract, Report
from .verdicts import EXECUTED, Overall, Verdict

_GAPS_SHOWN = 3
_NOT_JUDGED = (Verdict.INCONCLUSIVE, Verdict.UNTESTABLE, Verdict.UNSUPPORTED)


@dataclass(frozen=True)
class Sighting:
    """What some cases saw, and their ids within the contract."""

    what: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A contract that makes the run not conformant, with the cases that do so."""

    contract: Contract
    cases: tuple[Case, ...]
    of: int
    sightings: tuple[Sighting, ...]
    where: str
    command: str

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its cases."""
        return Verdict.worst(case.verdict for case in self.cases)

    @property
    def snippet(self) -> str | None:
        """A program that shows the failure with torch alone, where a case has one."""
        return next((case.snippet for case in self.cases if case.snippet), None)

    @property
    def trace(self) -> str | None:
        """The traceback of an exception, where a case ended with one."""
        return next((case.detail for case in self.cases if case.detail), None)


@dataclass(frozen=True)
class ChapterResult:
    """A chapter, the verdict of each of its contracts (None: not reached), and how many cases came to which verdict."""

    chapter: Chapter
    contracts: dict[str, Verdict | None]
    cases: Counter[Verdict]


def failures(report: Report) -> list[Failure]:
    """Return what makes the run not conformant, in the order of the catalogue, errors of the suite included."""
    return [failure(report, id, cases) for id, cases in rollup.failing(report).items()]


def failure(report: Report, id: str, cases: list[Case]) -> Failure:
    """Return the failing `cases` of the contract `id`, as the views show them."""
    contract = report.contracts[id]
    groups: dict[str, list[str]] = {}
    for case in cases:
        groups.setdefault(what(case), []).append(short_id(case))
    every = report.cases_of[id]
    ran, failed = Counter(case.target for case in every), Counter(case.target for case in cases)
    return Failure(
        contract,
        tuple(cases),
        len(every),
        tuple(Sighting(seen, tuple(ids)) for seen, ids in groups.items()),
        ", ".join(f"{target}: {failed[target]} of {text.count(ran[target], 'case')}" for target in failed),
        _command(report, contract, own_workload(cases[0])),
    )


def what(case: Case) -> str:
    """Return what a failing case saw."""
    if case.verdict is Verdict.UNTESTABLE:
        return f"could not be tested, which under --gpu fails a must: {case.reason}"
    return text.sighting(case)


def short_id(case: Case) -> str:
    """Return the part of a case id after its contract."""
    return case.id.removeprefix(case.contract).strip("[]") or case.id


def own_workload(case: Case) -> str:
    """Return the name of the user's workload that a case is about; empty where it is about none."""
    return case.parameters.get("workload", "")


def _command(report: Report, contract: Contract, own: str) -> str:
    """Return the command that runs the contract again under the same options."""
    options = report.header.options
    words = [*RUN.split(), "--contract", contract.id]
    words += ["--workload", own] * bool(own)
    words += ["--gpu"] * options.gpu
    words += [word for module in options.imports for word in ("--import", module)]
    words += [word for device in options.devices for word in ("--device", device)]
    words += [word for said in options.op_policies.items() for word in ("--op-policy", _declared(*said))]
    words += ["--amp-dtype", options.amp_dtype] * (options.amp_dtype != "both")
    words += ["--level", options.level] * (options.level != "standard")
    words += ["--seed", str(options.seed)] * (options.seed != 0)
    words += ["--no-waivers"] * options.no_waivers
    return shlex.join(words)


def _declared(device_type: str, said: str) -> str:
    """Return an op policy as the option takes it; of a surface the file's name alone is known."""
    backend, _, surface = said.partition(" in the surface ")
    return f"{device_type}=surface:{surface}:{backend}" if surface else f"{device_type}=like:{backend}"


def chapters(report: Report) -> list[ChapterResult]:
    """Return the chapters of the run in the order of the catalogue."""
    verdicts = rollup.verdicts(report)
    found = []
    for chapter in report.header.chapters:
        ids = [contract.id for contract in report.header.contracts if contract.chapter == chapter.name]
        counted = Counter(case.verdict for id in ids for case in report.cases_of[id])
        found.append(ChapterResult(chapter, {id: verdicts[id] for id in ids}, counted))
    return found


def with_verdict(report: Report, verdict: Verdict) -> dict[str, list[Case]]:
    """Return the contracts that have cases of that verdict, each with these."""
    found = {id: [case for case in cases if case.verdict is verdict] for id, cases in report.cases_of.items()}
    return {id: cases for id, cases in found.items() if cases}


def not_judged(report: Report) -> dict[Verdict, list[Reason]]:
    """Return why cases were not judged, by verdict: INCONCLUSIVE, UNTESTABLE, UNSUPPORTED."""
    found = {
        verdict: reasons.grouped(case for case in report.cases if case.verdict is verdict) for verdict in _NOT_JUDGED
    }
    return {verdict: groups for verdict, groups in found.items() if groups}


def not_reached(report: Report) -> dict[str, list[str]]:
    """Return why contracts have no case at all, each reason with their ids."""
    found: dict[str, list[str]] = {}
    for id, cases in report.cases_of.items():
        if not cases:
            result = report.footer.contracts.get(id) if report.footer else None
            found.setdefault(result.reason if result else "the run did not get that far", []).append(id)
    return found


def not_reached_count(report: Report) -> str:
    """Return how many contracts have no case, and how many of these count for no verdict; "" where there is none."""
    missing = [id for ids in not_reached(report).values() for id in ids]
    facts = sum(report.contracts[id].level == "info" for id in missing)
    said = text.count(len(missing), "contract") + (f" ({facts} of them for information only)" if facts else "")
    return said if missing else ""


def verdict(report: Report) -> str:
    """Return the verdict of the run with the targets that it is about."""
    return f"{rollup.overall(report).value} on {reach.on(report)}"


def grounds(report: Report) -> Iterator[str]:
    """Yield what the overall verdict rests on, and the accelerators that are here and were not judged."""
    yield from because(report)
    yield from reach.not_judged(report.header)


def because(report: Report) -> Iterator[str]:
    """Yield what the overall verdict rests on, in a few words each."""
    overall = rollup.overall(report)
    footer = report.footer
    verdicts = rollup.verdicts(report)
    judged = {id: verdict for id, verdict in verdicts.items() if report.contracts[id].level != "info"}
    counted = Counter(judged.values())
    if overall is Overall.INCOMPLETE:
        yield "the run did not end, so this is no pass"
    if overall is Overall.PARTIAL:
        yield f"only {text.some([str(gap) for gap in reach.gaps(report)], _GAPS_SHOWN)}, so this is no pass"
    if failing := rollup.failing(report):
        yield f"{text.count(len(failing), 'contract')} failed"
    if not any(case.verdict in EXECUTED for case in report.cases):
        yield "nothing was executed, so this is no pass"
    if footer and footer.problems:
        yield text.count(len(footer.problems), "problem")
    if footer and footer.baseline and (lost := text.tally(footer.baseline.regressed + footer.baseline.gone)):
        yield f"{lost} worse than in the baseline"
    if overall is Overall.INCONCLUSIVE and counted[Verdict.INCONCLUSIVE]:
        yield f"{text.count(counted[Verdict.INCONCLUSIVE], 'contract')} COULD NOT BE JUDGED, so this is no pass"
    if missed := rollup.missed(report):
        planted = text.count(len(rollup.planted(report)), "planted fault")
        yield f"{len(missed)} of {planted} NOT CAUGHT, so this is no pass"
    so_far = " so far" if overall is Overall.INCOMPLETE else ""

    def partly(verdict: Verdict) -> str:
        number = sum(rollup.in_part(report.cases_of[id]) for id, found in judged.items() if found is verdict)
        return f" ({number} of them in part)" * bool(number)

    if judged:
        hold = f"{counted[Verdict.PASS]} of {text.count(len(judged), 'contract')} hold{'s' * (len(judged) == 1)}"
        yield f"{hold}{partly(Verdict.PASS)}{so_far}"
    else:
        yield "nothing was judged"
    for verdict in (Verdict.WAIVED, Verdict.UNSUPPORTED, Verdict.UNTESTABLE, Verdict.INCONCLUSIVE):
        if counted[verdict]:
            yield f"{counted[verdict]} {verdict.value.lower()}{partly(verdict)}"
    if counted[None]:
        yield f"{counted[None]} not reached"
    if facts := len(verdicts) - len(judged):
        yield f"{text.count(facts, 'contract')} for information only"
    if narrowing := text.narrowing(report.header.options):
        yield f"the run was narrowed by {narrowing}"
