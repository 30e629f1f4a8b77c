"""Hooks that run a case: its surroundings, its verdict, and what pytest shows of it."""

from __future__ import annotations

import functools
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ..measure.pending import drop_pending
from ..report.encode import encode_case
from ..report.verdicts import Verdict
from . import benchmarks, cost, measuring
from .check import Allotment
from .endings import ContractViolation, Unsupported, Untestable
from .items import Facts, facts, of_case
from .keys import CASE, RUN

if TYPE_CHECKING:
    from .catalogue import Contract
    from .check import Case
    from .judge import Judgement
    from .run import Run
    from .state import Snapshot
    from .targets import Target


# The others of a contract mostly differ by a parameter, and a report of thousands of programs would not be small.
_PROGRAMS_OF_A_CONTRACT = 2
# Of a case that rests on the lists of a backend: ops that it reached in regions for which the device has other rules.
_OTHER_RULES: pytest.StashKey[set[str]] = pytest.StashKey()
_PROGRAMS: pytest.StashKey[Counter[str]] = pytest.StashKey()
# What is set as a case starts that no check holds under: a fixture or hook of the user's did it after the run began.
_SET_UP: pytest.StashKey[str | None] = pytest.StashKey()
# The case that ended last, where no region was open after it; and what was open again before any set-up of the next.
_ENDED: pytest.StashKey[str | None] = pytest.StashKey()
_LATE: pytest.StashKey[str] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # An exception raised by a signal inside a callback of the interpreter is lost; the flag is not.
    if item.config.stash[RUN].interrupted:
        raise KeyboardInterrupt("terminated")
    ended = item.config.stash.get(_ENDED, None)
    if ended is None or facts(item) is None:
        return
    from . import state

    if opened := state.leave_regions():
        item.stash[_LATE] = (
            f"a region is open again after {ended}, which left none ({opened}): what held its state was let go between "
            "the cases, such as a guard that a kernel had not left when it raised"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    found = facts(item)
    if found is None:
        return (yield)
    from . import lost_device, state

    before, run = state.Snapshot(), item.config.stash[RUN]
    item.stash[_SET_UP] = state.unlike_a_new_process()
    try:
        if late := item.stash.get(_LATE, None):
            raise ContractViolation(late)
        state.seed_everything(seed_of(item))
        _require_capabilities(found, item.config.stash[RUN])
        _require_a_run(item)
        with (
            nullcontext() if found.target is None else found.target.current(),
            _warnings_that_do_not_raise(),
            _measuring(item, found),
            _reaching_other_rules(item, found),
        ):
            result = yield
        lost_device.settle(run.accelerators)
        if leaks := before.leaks():
            raise ContractViolation(f"the case leaves state behind: {'; '.join(leaks)}")
        return result
    finally:
        _restore(before, run)
        item.config.stash[_ENDED] = None if state.region() else found.id


def _restore(before: Snapshot, run: Run) -> None:
    """Restore the state, if the devices still work."""
    with _unless_lost(run):
        before.restore()


def _let_go(error: BaseException, run: Run) -> None:
    """Drop what the frames of an error hold: a generator that stood in a region sets the state around that region."""
    from . import exhaustion, state

    with _unless_lost(run):
        before = state.Snapshot()
        exhaustion.let_go(error)
        before.restore()


@contextmanager
def _unless_lost(run: Run) -> Generator[None]:
    """Pass over what a device raises that no longer works: its state cannot be had, and its own error says more."""
    try:
        yield
    except RuntimeError:
        if run.lost() is None:
            raise


@contextmanager
def _warnings_that_do_not_raise() -> Generator[None]:
    """Let warnings be warnings, which -W and the filterwarnings of a project may turn into errors of torch."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
        yield


@contextmanager
def _measuring(item: pytest.Item, found: Facts) -> Generator[None]:
    """Give a timed check what it needs; raises where it cannot be had or the deadline has passed."""
    if not found.timed and not found.own:
        yield
        return
    if found.timed and (sys.gettrace() is not None or sys.getprofile() is not None):
        raise Untestable("a profiler, debugger or coverage tool watches each call, and would be timed: run without it")
    run = item.config.stash[RUN]
    progress = measuring.Progress(item.config)
    contract = run.catalogue.contracts[found.contract]
    publish = functools.partial(benchmarks.publish, item)
    if found.own:
        limit = run.time_limit
        ends = limit.begin(contract, found.steps.get("fewest", 1), cost.longest_step(run, found.target))
        item.stash[CASE].allotment = Allotment(ends, progress.show, publish, limit.now, limit.words)
    if found.timed:
        ends = run.deadlines.begin(contract)
        if found.own:
            ends = min(ends, run.deadlines.now() + item.stash[CASE].allowance)
        item.stash[CASE].allotment = Allotment(ends, progress.show, publish, run.deadlines.now)
    try:
        yield
    finally:
        progress.clear()
        if found.timed:
            run.deadlines.end(contract, ends)


@contextmanager
def _reaching_other_rules(item: pytest.Item, found: Facts) -> Generator[None]:
    """Note which ops a case reaches in regions for which the device has other rules than the lists of its backend."""
    from ..oracles.policy import declared

    device_type = "" if found.target is None else str(found.target.device_type)
    changed = declared.changed(device_type)
    if not changed or found.by_rules or found.timed:
        yield
        return
    from ..oracles.policy import overloads
    from ..oracles.trace.reached import reached_in_regions

    hiding = overloads.ruled(device_type) - changed
    with reached_in_regions(changed, hiding, device_type) as item.stash[_OTHER_RULES]:
        yield


def _require_capabilities(found: Facts, run: Run) -> None:
    target, dtype = found.target, found.parameters.get("amp_dtype")
    if target is None:
        return
    if found.own and run.own is not None and dtype is not None:
        only = run.own.only.get(target.device)
        if only not in (None, dtype):
            raise Unsupported(f"the workload's autocast settings have the dtype {only}, so that {dtype} is not judged")
    if dtype is not None and not target.supports(dtype):
        raise Unsupported(f"{target.name} ({target.probe['name']}) does not compute natively in {dtype}")
    for capability in found.needs:
        if reason := target.lacks(capability):
            raise Unsupported(f"{target.name} ({target.probe['name']}) lacks {capability}: {reason}")


def _require_a_run(item: pytest.Item) -> None:
    case = item.stash.get(CASE, None)
    if case is not None and any(not waiver.run for waiver in case.waivers):
        raise ContractViolation("not run, as it would end the process or leave the device unusable")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = facts(item)
    if found is not None and (call.when == "call" or (call.when == "setup" and call.excinfo is not None)):
        with _warnings_that_do_not_raise():  # what a device lacks is tried out
            _conclude(item, found, call, report)
    return report


def _lacking(error: BaseException | None, target: Target, case: Case) -> Judgement | None:
    """Judge a case for which a device has no dtype, or a third party's no kernel, or its module no function."""
    from . import judge
    from .targets import device_module, is_foreign

    if asked := judge.lacks_dtype(error, target.device):
        computes = f", in which {asked[0]} computes" if asked[0] else ""
        return judge.Judgement(Verdict.UNSUPPORTED, f"{target.name} has no {asked[1]}{computes}")
    if not is_foreign(target.device_type):
        return None
    if judge.lacks_sparse(error, target.device):
        return judge.Judgement(Verdict.UNSUPPORTED, f"{target.name} has no sparse tensors")
    if op := judge.lacks_kernel(error) or judge.named_kernel(one for one in case.evidence if not one.holds):
        case.evidence[:] = [one for one in case.evidence if one.holds]  # the rest is evidence of nothing
        return judge.Judgement(Verdict.UNSUPPORTED, f"{target.name} has no kernel of {op}")
    if op := judge.lacks_tangent(error, target.device_type):
        reason = f"{target.name} has a kernel of {op} of its own, of which torch has no forward derivative"
        return judge.Judgement(Verdict.UNSUPPORTED, reason)
    if name := judge.lacks_hook(error):
        return judge.Judgement(Verdict.UNSUPPORTED, f"the hooks of {target.device_type} have no {name}")
    if name := judge.lacks_function(error, device_module(target.device_type)):
        return judge.Judgement(Verdict.UNSUPPORTED, f"torch.{target.device_type} has no {name}")
    return None


def _conclude(item: pytest.Item, found: Facts, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Judge the case, put its record on the report, and give the report the outcome that pytest shows."""
    from . import exhaustion, judge

    run = item.config.stash[RUN]
    case = item.stash.get(CASE, None)
    error = None if call.excinfo is None else call.excinfo.value
    if isinstance(error, (KeyboardInterrupt, pytest.exit.Exception)):
        return
    if call.when == "setup" and error is not None:
        judgement = judge.broken(error, "the set-up")
    elif case is None:
        judgement = judge.Judgement(Verdict.ERROR, "the check does not ask for `case`, so it can record nothing")
    else:
        judgement = judge.judge(case, error)
        if found.target is not None and not found.target.is_fake:
            judgement = _lacking(error, found.target, case) or judgement
    if judgement.verdict is Verdict.FAIL and (unlike := item.stash.get(_SET_UP, None)):
        judgement = judge.set_up(unlike, judgement)
    if error is not None and exhaustion.ran_out(error):
        exhaustion.give_back(error)
    elif error is not None and not item.config.getoption("usepdb", False):
        _let_go(error, run)
    if error is not None and found.target is not None:
        drop_pending(found.target.device_type)
    if judgement.verdict in (Verdict.FAIL, Verdict.ERROR) and (lost := run.lost()) is not None:
        judgement = judge.Judgement(Verdict.FAIL, f"{judgement.reason}; afterwards {lost}", judgement.detail)
        report.lost_device = item.session.shouldstop = f"{lost}; the case that did it: {found.id}"  # type: ignore[attr-defined]
        waiver = None
    else:
        if case is not None and (others := item.stash.get(_OTHER_RULES, None)):
            judgement = judge.by_other_rules(case, found.target.device_type, others)
        judgement, waiver = judge.excuse(judgement, case)
    if case is not None and judgement.verdict is Verdict.FAIL:
        _reproduce(item, found, case, judgement.reason)
    entry = judge.record(
        id=found.id,
        contract=found.contract,
        node=item.nodeid,
        target=found.target_name,
        parameters=run.describe(found.parameters, "own" in item.fixturenames),  # type: ignore[attr-defined]
        case=case,
        judgement=judgement,
        waiver=waiver,
        duration=call.duration,
    )
    report.conformance = encode_case(entry)  # type: ignore[attr-defined]
    # Onto the item, since a JUnit file takes its properties from the report of the teardown.
    item.user_properties += [("contract", found.contract), ("case", entry.id), ("verdict", entry.verdict.value)]
    report.user_properties = list(item.user_properties)
    _show(report, judgement, run.catalogue.contracts[found.contract], str(item.path), waiver.reason if waiver else "")


def _reproduce(item: pytest.Item, found: Facts, case: Case, reason: str) -> None:
    """Make the program of the very case its snippet, for the first failures of a contract."""
    failures = item.config.stash.setdefault(_PROGRAMS, Counter())
    failures[found.contract] += 1
    if failures[found.contract] > _PROGRAMS_OF_A_CONTRACT:
        case.reproduce("")
        return
    from .environment import redact_folders
    from .reproduction import program

    text = program.of(item, found, case, seed_of(item), reason)
    case.snippet = redact_folders(program.importing(text, item.config.stash[RUN].options.imports))


def _show(report: pytest.TestReport, judgement: Any, contract: Contract, path: str, excuse: str) -> None:
    verdict = judgement.verdict
    if verdict is Verdict.PASS:
        report.outcome, report.longrepr = "passed", None
    elif verdict is Verdict.WAIVED:
        report.outcome, report.longrepr = "skipped", judgement.reason
        report.wasxfail = excuse
    elif verdict in (Verdict.FAIL, Verdict.ERROR):
        # What JUnit files and pytest's own summary show of the case.
        report.outcome = "failed"
        report.longrepr = (
            f"{contract.id}: {judgement.reason}\n"
            f"promised: {contract.title}. {contract.statement}\n"
            f"usual cause: {contract.failure}\n"
            f"next step: {contract.next_step}\n" + (judgement.detail or "")
        )
    else:
        report.outcome = "skipped"
        report.longrepr = (path, 0, f"{verdict.value}: {judgement.reason}")


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    entry = getattr(report, "conformance", None)
    if entry is not None and entry["verdict"] == Verdict.ERROR.value:
        return "error", "E", "ERROR"
    return None


def seed_of(item: pytest.Item) -> int:
    seed = item.config.stash[RUN].options.seed
    return zlib.crc32(f"{seed}/{of_case(item).id}".encode())
