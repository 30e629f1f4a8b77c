"""The outcome of a run: verdicts of contracts, states of waivers, comparison with a baseline, exit status."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ..report import comparison, consistency, rollup, text, values
from ..report.document import SCHEMA
from ..report.verdicts import EXECUTED, Overall, Verdict
from . import targets, waivers
from .header import now
from .waivers import Waiver

if TYPE_CHECKING:
    from .run import Run

_NAMES = 3

NOT_ENOUGH = 6
"""The exit status of a PARTIAL run, and of an INCONCLUSIVE one under --require-conclusive."""


def judged(run: Run, header: values.Header, pytest_status: int) -> values.Report:
    """Return the report of `run`, whose cases have all ended, without its digest.

    `pytest_status` is the exit status that pytest itself would end with.
    """
    stopped = pytest_status == pytest.ExitCode.INTERRUPTED and not run.device_lost
    interrupted = run.interrupted or stopped
    for amiss in [] if interrupted else _records_amiss(run, pytest_status):
        run.broke(amiss)
    for watch in run.watches:
        watch.finish()
        run.problems += watch.problems()
    cases: dict[str, list[values.Case]] = {id: [] for id in run.contracts}
    for case in run.cases:
        cases[case.contract].append(case)
    states = [_state(run, waiver, cases.get(waiver.contract, [])) for waiver in run.waivers]
    run.problems += [problem for state in states if (problem := _stale(state)) is not None]
    footer = values.Footer(
        finished=now(),
        duration_s=round(time.monotonic() - run.started, 3),
        overall=Overall.INCOMPLETE,
        exit_status=0,
        interrupted=interrupted,
        contracts={id: _result(run, id, found, interrupted) for id, found in cases.items()},
        totals=dict(Counter(case.verdict for case in run.cases)),
        waivers=tuple(states),
        problems=tuple(run.problems),
        baseline=None,
        health=tuple(
            values.Health(one.name, dict(one.before), dict(one.after), tuple(one.xids)) for one in run.watches
        ),
        not_applicable=run.not_applicable,
        self_check=run.self_check,
        unreached=_unreached(run, cases),
    )
    report = values.Report(SCHEMA, header, tuple(run.cases), footer)
    left = run.scheduled - {case.id for case in run.cases}
    if run.stopped and left and not run.problems and not rollup.failing(report):
        # What stopped it is a contract for information only, so that nothing says what the rest is.
        report = replace(report, footer=replace(footer, interrupted=True))
    if run.baseline is not None and not interrupted and not run.device_lost:
        report = replace(report, footer=replace(footer, baseline=_compared(run, *run.baseline, report)))
    report = concluded(run, report, pytest_status)
    # What `verify` would say of the report: such a contradiction is a fault of the suite, not of torch.
    if contradictions := list(consistency.contradictions(report)):
        run.broke(f"the records contradict themselves: {contradictions[0]}{_and_more(contradictions)}")
        report = concluded(run, report, pytest_status)
    return report


def concluded(run: Run, report: values.Report, pytest_status: int) -> values.Report:
    """Return the report with the problems of `run`, its overall verdict and its exit status."""
    assert report.footer is not None
    footer = replace(report.footer, problems=tuple(run.problems))
    overall = rollup.overall(replace(report, footer=footer))
    status = _exit_status(run, footer, overall, pytest_status)
    return replace(report, footer=replace(footer, overall=overall, exit_status=status))


def _records_amiss(run: Run, pytest_status: int) -> Iterator[str]:
    """Say which cases left no record, or more than one, though nothing stopped the run before its end."""
    counts = Counter(case.id for case in run.cases)
    if twice := sorted(id for id, count in counts.items() if count > 1):
        yield f"{text.count(len(twice), 'case')} left more than one record: {text.some(twice, _NAMES)}"
    early = run.stopped or run.device_lost or run.smoke_failed or pytest_status == pytest.ExitCode.INTERNAL_ERROR
    if not early and (lost := sorted(run.scheduled - set(counts))):
        yield f"{text.count(len(lost), 'case')} left no record: {text.some(lost, _NAMES)}"
    # Workers that are given nothing end after the report is written.
    early = early or pytest_status == pytest.ExitCode.NO_TESTS_COLLECTED
    if run.surroundings.workers and not run.collected and not early:
        yield "no worker process said what it collected"


def _and_more(problems: Sequence[str]) -> str:
    return f" (and {len(problems) - 1} more)" * (len(problems) > 1)


def _result(run: Run, id: str, cases: list[values.Case], interrupted: bool) -> values.ContractResult:
    """Return the verdict of a contract, or why it has none."""
    verdict = rollup.contract_verdict(cases)
    if verdict is None:
        return values.ContractResult(None, 0, _why_not_reached(run, id, interrupted))
    # Of several reasons that of the first id, so that the order of the cases makes no difference.
    first = min((case for case in cases if case.verdict is verdict), key=lambda case: case.id)
    return values.ContractResult(verdict, len(cases), first.reason)


def _why_not_reached(run: Run, contract: str, interrupted: bool) -> str:
    if interrupted:
        return "the run was interrupted before"
    if contract in run.reasons:
        return run.reasons[contract]
    if run.device_lost:
        return "a device stopped working before"
    if any(row[0] == contract for row in run.collected):
        return "left out by the selection of tests, or the run stopped before"
    return "none of its checks was collected"


def _unreached(run: Run, cases: Mapping[str, list[values.Case]]) -> dict[str, tuple[str, ...]]:
    """Return, by target, the contracts that have no case there though nothing that was asked for leaves them out."""
    listed = {row[0] for row in run.collected} | set(run.reasons)  # less what -k and the like leave out
    found = {name: listed & ids for name, ids in run.nothing_to_try.items()}
    if run.surroundings.selection is None and not run.stopped:
        # A plugin left their cases or their modules out.
        lost = {id for id in run.contracts if not cases[id] and id not in run.reasons}
        found.setdefault(run.targets[0].name, set()).update(lost)
    return {
        name: tuple(id for id in run.contracts if id in ids and not any(case.target == name for case in cases[id]))
        for name, ids in found.items()
        if any(id in run.contracts for id in ids)
    }


def _compared(run: Run, baseline: values.Report, name: str, report: values.Report) -> values.Baseline:
    """Compare the run with its baseline; a line on accepted changes that excuses nothing any more is a problem."""
    found = comparison.compare(baseline, report, run.accepted, today=waivers.today())
    run.problems += found.stale
    return values.Baseline(
        name,
        found.regressed,
        found.gone,
        tuple(values.KnownChange(change.id, change.new, change.why) for change in found.known),
        found.accepted,
    )


def _state(run: Run, waiver: Waiver, cases: list[values.Case]) -> values.Waiver:
    """Return what became of a waiver in this run, from the `cases` of its contract."""
    names = [*(target.name for target in run.targets), "host"]
    applies = {name: run.applies(waiver, name) for name in names}
    foreign = {target.name for target in run.targets if targets.is_foreign(target.device_type)}
    unseen = {target.name for target in run.targets if target.device_type in run.autocast_kernels or not target.is_fake}
    collected = [row for row in run.collected if row[0] == waiver.contract and applies[row[2]]]
    named = [row for row in collected if waiver.names(row[0], row[1])]
    ran = [
        case.verdict
        for case in cases
        if waiver.names(case.contract, case.id)
        and applies[case.target]
        and not (case.verdict is Verdict.PASS and _elsewhere(waiver, case.target, foreign, unseen))
    ]
    # A case that the selection or the level left out may be the one that is named.
    narrowed = run.surroundings.selection is not None or waiver.contract in run.shallow
    if waiver.expired(waivers.today()) and any(applies.values()):
        state = "expired"
    elif collected and not named and not narrowed:
        state = "unmatched"
    elif Verdict.PASS in ran and not waiver.varies:
        state = "unneeded"
    elif Verdict.WAIVED in ran:
        state = "used"
    else:
        state = "idle"
    return values.Waiver(
        contract=waiver.contract,
        cases=waiver.cases,
        reason=waiver.reason,
        owner=waiver.owner,
        link=waiver.link,
        expires=waiver.expires.isoformat(),
        state=state,  # type: ignore[arg-type]  # one of its literals
        matched=len(ran),
    )


def _elsewhere(waiver: Waiver, target: str, foreign: Collection[str], unseen: Collection[str]) -> bool:
    """Whether a target may do right what the waiver is about: another's device, or kernels that we have not seen.

    The device is another's where no pattern of the waiver names it. What kernels compute depends on the instructions
    of a CPU as on an accelerator; fake tensors run none.
    """
    return (target in foreign and not waiver.speaks_of(target)) or (target in unseen and waiver.shipped)


def _stale(waiver: values.Waiver) -> str | None:
    """Say why a waiver fails the run, or None."""
    name = f"the waiver of {waiver.contract} ({', '.join(waiver.cases)})"
    return {
        "expired": f"{name} expired on {waiver.expires}",
        "unmatched": f"{name} matches no case of the contract",
        "unneeded": f"{name} is no longer needed: a case that it names passes",
    }.get(waiver.state)


def _exit_status(run: Run, footer: values.Footer, overall: Overall, pytest_status: int) -> int:
    if footer.interrupted:
        return int(pytest.ExitCode.INTERRUPTED)
    if pytest_status == pytest.ExitCode.USAGE_ERROR:
        return pytest_status
    failed = any(case.verdict is Verdict.FAIL and run.contracts[case.contract].judges for case in run.cases)
    executed = any(case.verdict in EXECUTED for case in run.cases)
    broken = run.broken or any(case.verdict is Verdict.ERROR for case in run.cases)
    if failed or (overall is Overall.NOT_CONFORMANT and executed and not broken):
        return int(pytest.ExitCode.TESTS_FAILED)
    if broken or pytest_status == pytest.ExitCode.INTERNAL_ERROR:
        return int(pytest.ExitCode.INTERNAL_ERROR)
    if not executed:
        return int(pytest.ExitCode.TESTS_FAILED if run.smoke_failed else pytest.ExitCode.NO_TESTS_COLLECTED)
    if overall is Overall.PARTIAL or (overall is Overall.INCONCLUSIVE and run.options.require_conclusive):
        return NOT_ENOUGH
    return int(pytest.ExitCode.OK)
