"""Two reports compared: what changed around the run, then what regressed, and the rest."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.harness.verdicts import Verdict
from conformance.report import rollup
from conformance.report.values import Report


@dataclass(frozen=True)
class Regressions:
    """Ids of contracts and cases that passed there and do not pass (`regressed`) or are not there (`gone`) now."""

    regressed: tuple[str, ...]
    gone: tuple[str, ...]


def regressions(old: Report, new: Report) -> Regressions:
    """Compare `new` with the baseline `old`; contracts of level info never count."""
    now = _verdicts(new)
    passed = [id for id, verdict in _verdicts(old).items() if verdict is Verdict.PASS]
    regressed = tuple(id for id in passed if now.get(id) not in (None, Verdict.PASS))
    return Regressions(regressed, tuple(id for id in passed if now.get(id) is None))


def _verdicts(report: Report) -> dict[str, Verdict | None]:
    """Return the verdicts of contracts and cases that can count, contracts first."""
    judged = {id for id, contract in report.contracts.items() if contract.level != "info"}
    contracts = {id: verdict for id, verdict in rollup.verdicts(report).items() if id in judged}
    return contracts | {case.id: case.verdict for case in report.cases if case.contract in judged}
