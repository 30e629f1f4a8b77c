"""The pytest plugin: options in, cases and verdicts through, one report out."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..report.verdicts import Verdict
from . import benchmarks, measuring, parallel
from . import catalogue as catalogues
from . import options as options_module
from .check import DEPTHS, Allotment, Case, ContractViolation, Unsupported, Untestable
from .items import Facts, depth, facts, of_case, register_marks

if TYPE_CHECKING:
    import torch

    from ..workloads.user_workload import Builder
    from .catalogue import Contract
    from .expectations import Expectations
    from .run import Run
    from .state import Snapshot
    from .targets import Target

PACKAGE = Path(__file__).resolve().parent.parent
RUN: pytest.StashKey[Run] = pytest.StashKey()
CASE: pytest.StashKey[Case] = pytest.StashKey()
CHAPTERS = PACKAGE / "chapters"
_LAST = ("memory", "speed")
_ABSENT = "none"


def pytest_addoption(parser: pytest.Parser) -> None:
    options_module.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.option.list_contracts:
        if parallel.possible(config) and _only_conformance(config):
            options = options_module.read(config)
            parallel.engage(config, options, len(options_module.select(catalogues.load(), options)))
        return None
    catalogue = catalogues.load()
    for contract in options_module.named(catalogue, options_module.read(config)).values():
        bounds = [f"since {contract.since}"] * bool(contract.since) + [f"until {contract.until}"] * bool(contract.until)
        bounds += ["with --workload"] * (contract.needs == "workload")
        tail = f"  ({', '.join(bounds)})" if bounds else ""
        print(f"{contract.id:<20} {contract.level:<6} {contract.authority:<11} {contract.title}{tail}")
    return 0


def pytest_configure(config: pytest.Config) -> None:
    register_marks(config)
    options = options_module.read(config)
    _wait_without_spinning()
    options_module.require_packages()
    options_module.require_torch()
    from .run import Run

    run = config.stash[RUN] = Run.prepare(options, config)
    if parallel.is_worker(config):
        config.pluginmanager.register(parallel.Worker(run), "conformance-worker")
    elif not config.option.collectonly:
        config.pluginmanager.register(_Controller(run), "conformance-controller")
    if parallel.is_controller(config):
        config.pluginmanager.register(parallel.Alone(run), "conformance-alone")
    # Hypothesis keeps notes on the modules it sees; a run leaves nothing in the folder where it was started.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir(), "conformance-hypothesis")))
    # A chapter that this torch cannot even import must not keep the others from running.
    config.option.continue_on_collection_errors = True
    if _only_conformance(config):
        _quieten(config)
    if benchmarks.present(config):
        config.pluginmanager.register(benchmarks.Benchmarks(run, config), "conformance-benchmarks")
    config.add_cleanup(gc.unfreeze)
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, functools.partial(_interrupt, run))
        config.add_cleanup(functools.partial(_restore_signal, before))


def _wait_without_spinning() -> None:
    """Let OpenMP threads sleep while they wait; on a busy machine spinning makes small operations many times slower."""
    if "torch" not in sys.modules:  # the OpenMP runtime reads these once, when torch loads it
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("KMP_BLOCKTIME", "0")


def _restore_signal(handler: Any) -> None:
    signal.signal(signal.SIGTERM, handler)


def _interrupt(run: Run, number: int, frame: object) -> None:
    run.interrupted = True
    raise KeyboardInterrupt("terminated")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # An exception raised by a signal inside a callback of the interpreter is lost; the flag is not.
    if item.config.stash[RUN].interrupted:
        raise KeyboardInterrupt("terminated")


def _only_conformance(config: pytest.Config) -> bool:
    places = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return config.option.pyargs or all(place == PACKAGE or PACKAGE in place.parents for place in places)


def _quieten(config: pytest.Config) -> None:
    """Leave the account of failures to the suite's own summary, unless the user asked for pytest's."""
    option = config.option
    if not hasattr(option, "tbstyle"):  # -p no:terminal
        return
    if option.tbstyle == "auto":
        option.tbstyle = "no"
    if option.reportchars == "fE":
        option.reportchars = ""
    option.disable_warnings = True


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [*config.stash[RUN].heading(), parallel.heading(config)]


def pytest_sessionstart(session: pytest.Session) -> None:
    if _only_conformance(session.config):
        _drop_log_capture(session.config)
        _leave_asserts_as_they_are(session.config)
    if session.config.pluginmanager.has_plugin("conformance-controller"):
        session.config.stash[RUN].begin()


def _drop_log_capture(config: pytest.Config) -> None:
    """Take pytest's capture of log records away, which costs a case as much as its check, unless it is asked for."""
    capture = config.pluginmanager.get_plugin("logging-plugin")
    asked = (config.option.log_level, config.option.log_cli_level, config.option.log_file)
    if capture is not None and not any(asked) and not config.getini("log_cli"):
        config.pluginmanager.unregister(capture)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the modules of chapters that were not asked for, or of which another process runs all, unimported."""
    chapter = _chapter(collection_path)
    if chapter is None or not collection_path.name.startswith("test_"):
        return None
    run = config.stash[RUN]
    if parallel.is_controller(config) and _module(collection_path) not in run.left_to_the_controller:
        return True
    return True if chapter not in run.chapters else None


def _chapter(path: Path) -> str | None:
    """The chapter in whose folder a module of checks lies; None of another module."""
    return path.parent.name if path.parent.parent == CHAPTERS else None


def _module(path: Path) -> str:
    """Name a module of checks, `<chapter>/test_<subject>.py`, whatever folder the suite lies in."""
    return f"{path.parent.name}/{path.name}"


def _leave_asserts_as_they_are(config: pytest.Config) -> None:
    """Take pytest's rewriting of asserts away: checks judge by `case`, and compiling them anew takes a second."""
    hook = getattr(config.pluginmanager, "rewrite_hook", None)
    if hook in sys.meta_path:
        sys.meta_path.remove(hook)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Leave out the checks of contracts that were not selected, before they are multiplied into cases."""
    named = [mark.args[0] for mark in getattr(obj, "pytestmark", ()) if mark.name == "contract"]
    return [] if named and named[0] not in collector.config.stash[RUN].contracts else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("contract")
    if mark is None:
        return
    run = metafunc.config.stash[RUN]
    metafunc.definition.own_markers = [_prune(own, run, mark.args[0]) for own in metafunc.definition.own_markers]
    own = metafunc.definition.get_closest_marker("per_target")
    if own is not None:
        _parametrize_per_target(metafunc, run, mark, own)
    elif "target" in metafunc.fixturenames:
        targets = run.targets_for(mark.kwargs["on"])
        _parametrize(metafunc, "target", targets, [run.slot(target) for target in targets])
    if "amp_dtype" in metafunc.fixturenames:
        names = run.dtypes_for(mark.kwargs["dtypes"])
        _parametrize(metafunc, "amp_dtype", [run.amp_dtype(name) for name in names], names)


def _parametrize_per_target(metafunc: pytest.Metafunc, run: Run, mark: pytest.Mark, own: pytest.Mark) -> None:
    """Parametrise a check by its targets and, for each, by the values that belong to it."""
    name, values_of = own.args
    sets: list[Any] = []
    deeper: list[Any] = []
    for target in run.targets_for(mark.kwargs["on"]):
        for value in values_of(target):
            plain, marks = (value.values[0], value.marks) if hasattr(value, "marks") else (value, ())
            made = pytest.param(target, plain, marks=marks, id=f"{run.slot(target)}-{plain}")
            (sets if depth(marks) <= run.depth else deeper).append(made)
    if deeper:
        run.shallow.add(mark.args[0])
    # Where all are left out, one stays, so that the reason can be told.
    sets = sets or deeper[:1] or [pytest.param(None, None, id=_ABSENT)]
    metafunc.parametrize(("target", name), sets, indirect=["target"])


def _prune(mark: pytest.Mark, run: Run, contract: str) -> pytest.Mark:
    """Take the parameters that the level leaves out from a parametrize mark, before they become items.

    Where all are left out, one stays, so that the reason can be told.
    """
    if mark.name != "parametrize":
        return mark
    names, values, *rest = mark.args
    values = list(values)
    kept = [place for place, value in enumerate(values) if depth(getattr(value, "marks", ())) <= run.depth] or [0]
    if len(kept) == len(values):
        return mark
    run.shallow.add(contract)
    kwargs = dict(mark.kwargs)
    if isinstance(kwargs.get("ids"), (list, tuple)):
        kwargs["ids"] = [kwargs["ids"][place] for place in kept]
    return pytest.mark.parametrize(names, [values[place] for place in kept], *rest, **kwargs).mark


def _parametrize(metafunc: pytest.Metafunc, name: str, values: list[Any], ids: list[str]) -> None:
    """Parametrise a fixture; where nothing fits, one stand-in is collected so that the reason can be told."""
    metafunc.parametrize(name, values or [None], ids=ids or [_ABSENT], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[RUN]
    kept, dropped, timed = [], [], []
    for item in items:
        found = facts(item)
        if parallel.elsewhere(config, found is not None and found.alone):
            run.left_to_the_controller.add(_module(item.path))
            continue
        if found is None:
            kept.append(item)
            continue
        absent = None if found.absent is None else found.absent(found.target)
        reason = absent or _left_out(item, found, run)
        if reason is None:
            kept.append(item)
            timed += [found] if found.timed else []
        else:
            dropped.append(item)
            run.reasons.setdefault(found.contract, reason)
        if absent is not None:
            run.not_applicable[found.id] = absent
        if not found.stand_in:
            run.collected.append((found.contract, found.id, found.target_name))
    _refuse_repeated_ids(run)
    run.deadlines.plan((run.catalogue.contracts[found.contract], found.target.device_type) for found in timed)
    # Stable: whatever order a plugin made is kept, but what needs an idle machine runs after all else, and what shares
    # a deadline in the order of the files, so that each run divides it alike: what is judged before information.
    kept.sort(key=_lateness)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    with parallel.without_collections():
        return (yield)


def _refuse_repeated_ids(run: Run) -> None:
    counts = Counter(id for _, id, _ in run.collected)
    if repeated := [id for id, count in counts.items() if count > 1]:
        raise pytest.UsageError(f"two cases have the id {repeated[0]}: give the checks or their parameters other names")


def _lateness(item: pytest.Item) -> tuple[Any, ...]:
    chapter, found = _chapter(item.path), facts(item)
    if chapter not in _LAST:
        return (0 if found is None else int(found.alone),)
    if found is None or not found.timed:
        return (_LAST.index(chapter) + 2,)
    callspec = getattr(item, "callspec", None)
    indices = () if callspec is None else tuple(callspec.indices.values())
    judged = item.config.stash[RUN].catalogue.contracts[found.contract].judges
    return (_LAST.index(chapter) + 2, not judged, item.path.name, item.location[1], indices)


def _left_out(item: pytest.Item, found: Facts, run: Run) -> str | None:
    """Say why an item is no case of this run, or None where it is one."""
    if found.parameters.get("target", "") is None:
        if found.by_target and run.targets_for(found.kinds):
            return f"has nothing to try on {run.target_names()}"
        return f"runs on {', '.join(found.kinds)} only; this run has {run.target_names()}"
    if not run.dtypes_for(found.dtypes):
        return f"is about {', '.join(found.dtypes)} only, which --amp-dtype leaves out"
    if found.depth > run.depth:
        return f"needs --level {DEPTHS[found.depth]}"
    return benchmarks.left_out(item)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    """The target of this case."""
    found: Target = request.param
    return found


@pytest.fixture
def amp_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The autocast dtype of this case: torch.float16 or torch.bfloat16."""
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The case: records the evidence and judges it."""
    item = request.node
    run, found = request.config.stash[RUN], of_case(item)
    device = getattr(found.target, "name", "cpu").removeprefix("fake:")
    dtypes = run.dtypes_for(found.dtypes)
    dtype = found.parameters.get("amp_dtype") or run.amp_dtype(dtypes[0])
    made = Case(
        run.catalogue.contracts[found.contract],
        level=run.options.level,
        seed=run.options.seed,
        substitutions={"device": device, "amp_dtype": str(dtype)},
        amp_dtypes=tuple(run.amp_dtype(name) for name in dtypes),
    )
    item.stash[CASE] = made
    return made


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator on the CPU, seeded from --seed and the case, the same on every device."""
    import torch

    return torch.Generator().manual_seed(_seed(request.node))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch's CPU operations, for checks whose work is too small to share."""
    from ..measure import threads

    with threads.one_thread():
        yield


@pytest.fixture
def expectations(request: pytest.FixtureRequest) -> Expectations:
    """What speed-ups are held against."""
    return request.config.stash[RUN].expectations


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Builder:
    """What builds the user's workload."""
    found = request.config.stash[RUN].own
    assert found is not None, "the contract of a check that asks for `own` needs a workload"
    return found


def _seed(item: pytest.Item) -> int:
    seed = item.config.stash[RUN].options.seed
    return zlib.crc32(f"{seed}/{of_case(item).id}".encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    found = facts(item)
    if found is None:
        return (yield)
    from . import lost_device, state

    before, run = state.Snapshot(), item.config.stash[RUN]
    try:
        state.seed_everything(_seed(item))
        _require_capabilities(found)
        with nullcontext() if found.target is None else found.target.current(), _measuring(item, found):
            result = yield
        lost_device.settle(run.accelerators)
        if leaks := before.leaks():
            raise ContractViolation(f"the case leaves state behind: {'; '.join(leaks)}")
        return result
    finally:
        _restore(before, run)


def _restore(before: Snapshot, run: Run) -> None:
    """Restore the state; a device that no longer works cannot be restored, and its own error says more."""
    try:
        before.restore()
    except RuntimeError:
        if run.lost() is None:
            raise


@contextmanager
def _measuring(item: pytest.Item, found: Facts) -> Generator[None]:
    """Give a timed check what it needs; raises where it cannot be had or the deadline has passed."""
    if not found.timed:
        yield
        return
    if sys.gettrace() is not None or sys.getprofile() is not None:
        raise Untestable("a profiler, debugger or coverage tool watches each call, and would be timed: run without it")
    run = item.config.stash[RUN]
    progress = measuring.Progress(item.config)
    item.stash[CASE].allotment = Allotment(
        run.deadlines.begin(run.catalogue.contracts[found.contract]),
        progress.show,
        functools.partial(benchmarks.publish, item),
        run.deadlines.now,
    )
    try:
        yield
    finally:
        progress.clear()


def _require_capabilities(found: Facts) -> None:
    target, dtype = found.target, found.parameters.get("amp_dtype")
    if target is None:
        return
    if dtype is not None and not target.supports(dtype):
        raise Unsupported(f"{target.name} ({target.probe['name']}) does not compute natively in {dtype}")
    for capability in found.needs:
        if reason := target.lacks(capability):
            raise Unsupported(f"{target.name} ({target.probe['name']}) lacks {capability}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = facts(item)
    if found is not None and (call.when == "call" or (call.when == "setup" and call.excinfo is not None)):
        _conclude(item, found, call, report)
    return report


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
    if error is not None and exhaustion.ran_out(error):
        exhaustion.give_back(error)
    if judgement.verdict in (Verdict.FAIL, Verdict.ERROR) and (lost := run.lost()) is not None:
        judgement = judge.Judgement(Verdict.FAIL, f"{judgement.reason}; afterwards {lost}", judgement.detail)
        report.lost_device = item.session.shouldstop = f"{lost}; the case that did it: {found.id}"  # type: ignore[attr-defined]
        waiver = None
    else:
        waiver = run.waiver_for(found.contract, found.id, found.target_name)
    judgement = judge.excuse(judgement, waiver)
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
    report.conformance = entry  # type: ignore[attr-defined]
    # Onto the item, since a JUnit file takes its properties from the report of the teardown.
    item.user_properties += [("contract", found.contract), ("case", entry["id"]), ("verdict", entry["verdict"])]
    report.user_properties = list(item.user_properties)
    _show(report, judgement, run.catalogue.contracts[found.contract], str(item.path), waiver.reason if waiver else "")


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


class _Controller:
    """The hooks of the process that writes the report."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (entry := getattr(report, "conformance", None)) is not None:
            self._run.add(entry)
            if (lost := getattr(report, "lost_device", None)) is not None:
                self._run.lose(lost)
        elif report.failed and _ours(report.nodeid):
            # A teardown that raised, or under xdist a worker process that died in the middle of a case.
            self._run.broke(f"{report.nodeid}: the {report.when} phase broke: {_last_line(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._run.broke(f"{report.nodeid or 'collection'}: cannot be collected: {_last_line(report)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over what an xdist worker collected, since the controller collects nothing itself."""
        output = getattr(node, "workeroutput", {})
        if "conformance" in output:
            self._run.merge(output["conformance"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        session.exitstatus = self._run.finish(int(exitstatus))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        short = terminalreporter.verbosity < 0
        width = min(max(terminalreporter._tw.fullwidth, 80), 120)
        text = self._run.summary(short=short, width=width)
        terminalreporter.ensure_newline()
        terminalreporter.write_line("")
        terminalreporter.write_line(text)


def _ours(nodeid: str) -> bool:
    return Path(nodeid.split("::")[0]).name.startswith("test_") and PACKAGE.name in Path(nodeid.split("::")[0]).parts


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
