"""From the verdicts of cases to those of contracts and of the run: used by the run and by every reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from . import reach
from .values import Case, Contract, PlantedFault, Report
from .verdicts import EXECUTED, Overall, Verdict

# How the reasons begin why a contract has no case: it is about another kind of target, or about a deeper level.
OTHER_TARGET, DEEPER = "runs on ", "needs --level "
# What becomes of a waiver that rots: each of these fails the run.
STALE = frozenset({"expired", "unmatched", "unneeded"})


def contract_verdict(cases: Iterable[Case]) -> Verdict | None:
    """Return the worst verdict of a contract's `cases`, or None where it was not reached.

    UNSUPPORTED cases count only where no case was judged.
    """
    verdicts = {case.verdict for case in cases}
    if verdicts & EXECUTED:
        verdicts.discard(Verdict.UNSUPPORTED)
    return Verdict.worst(verdicts) if verdicts else None


def verdicts(report: Report) -> dict[str, Verdict | None]:
    """Return the verdict of every contract of the run, from its cases."""
    return {id: contract_verdict(cases) for id, cases in report.cases_of.items()}


def in_part(cases: Iterable[Case]) -> bool:
    """Whether some of a contract's `cases` pass and others do not."""
    verdicts = {case.verdict for case in cases}
    return Verdict.PASS in verdicts and len(verdicts) > 1


def not_applicable(report: Report) -> dict[str, list[str]]:
    """Return each reason why a case cannot exist on the machine, with the contract of every such case."""
    found: dict[str, list[str]] = {}
    for id, reason in (report.footer.not_applicable if report.footer else {}).items():
        found.setdefault(reason, []).append(id.split("[")[0])
    return found


def totals(report: Report) -> dict[Verdict, int]:
    """Count the cases of each verdict."""
    counted = Counter(case.verdict for case in report.cases)
    return {verdict: counted[verdict] for verdict in Verdict if counted[verdict]}


def counts_as_failure(contract: Contract, case: Case, *, gpu: bool) -> bool:
    """Whether `case` makes the run not conformant; a `must` that is untestable does so under --gpu."""
    if case.verdict is Verdict.ERROR:
        return True  # the suite broke, whatever it was about to measure
    if contract.level == "info":
        return False
    return case.verdict is Verdict.FAIL or (gpu and contract.level == "must" and case.verdict is Verdict.UNTESTABLE)


def failing(report: Report) -> dict[str, list[Case]]:
    """Return the contracts that make the run not conformant, each with the cases that do so."""
    gpu = report.header.options.gpu
    found = {
        id: [case for case in report.cases_of[id] if counts_as_failure(contract, case, gpu=gpu)]
        for id, contract in report.contracts.items()
    }
    return {id: cases for id, cases in found.items() if cases}


def planted(report: Report) -> list[PlantedFault]:
    """Return the faults that the self-check planted, caught or not."""
    check = report.footer.self_check if report.footer else None
    return [fault for fault in check.faults if fault.state != "not planted"] if check else []


def missed(report: Report) -> list[PlantedFault]:
    """Return the planted faults that no contract noticed: what passes in such a run may be as broken."""
    return [fault for fault in planted(report) if fault.state == "missed"]


def overall(report: Report) -> Overall:
    """Return what the run comes to, from its records; what the footer says of it is not looked at."""
    footer = report.footer
    if footer is None or footer.interrupted:
        return Overall.INCOMPLETE
    stale = footer.problems or any(waiver.state in STALE for waiver in footer.waivers)
    regressed = footer.baseline is not None and (footer.baseline.regressed or footer.baseline.gone)
    if stale or regressed or failing(report):
        return Overall.NOT_CONFORMANT
    if not any(case.verdict in EXECUTED for case in report.cases):
        return Overall.NOTHING_RAN
    if reach.gaps(report):
        return Overall.PARTIAL
    judged = (report.cases_of[id] for id, contract in report.contracts.items() if contract.level != "info")
    if missed(report) or any(case.verdict is Verdict.INCONCLUSIVE for cases in judged for case in cases):
        return Overall.INCONCLUSIVE
    return Overall.CONFORMANT
