"""Several processes for one run: pytest-xdist's workers run what may run side by side, the controller all else."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from . import benchmarks

if TYPE_CHECKING:
    from .options import Options
    from .run import Run

# More processes than these gain nothing: on an accelerator they share it, on a CPU each imports torch and collects.
AT_MOST = {"accelerator": 4, "cpu": 8}
# Below this number of contracts a run ends before the workers have started.
WORTHWHILE = {"quick": 100, "standard": 20, "full": 20}
# Options of pytest that need the tests in the process that was started: debuggers, uncaptured output, earlier results.
_IN_PROCESS = ("usepdb", "trace", "collectonly", "lf", "failedfirst", "newfirst", "stepwise")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of pytest-xdist's workers."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process gives cases to workers; it runs those that have to be alone when the workers have ended."""
    return not is_worker(config) and getattr(config.option, "dist", "no") != "no"


def possible(config: pytest.Config) -> bool:
    """Whether pytest-xdist is installed, this is none of its workers, and no option needs one process or a number."""
    option = config.option
    if not hasattr(option, "numprocesses") or option.numprocesses is not None or option.dist != "no" or option.tx:
        return False
    in_process = any(getattr(option, name, False) for name in _IN_PROCESS) or getattr(option, "capture", "no") == "no"
    by_node = any("::" in argument for argument in config.args)
    return not (in_process or by_node or benchmarks.asked(config) or _in_worker())


def engage(config: pytest.Config, options: Options, contracts: int) -> None:
    """Ask pytest-xdist for workers where the run is worth it; called before pytest-xdist is configured."""
    processes = workers(options)
    if processes > 1 and contracts >= WORTHWHILE[options.level]:
        option = config.option
        option.numprocesses, option.dist, option.tx = processes, "worksteal", ["popen"] * processes


def workers(options: Options) -> int:
    """Return how many processes share a run: as many as processors, up to a number that suits the device."""
    accelerator = options.gpu or any(not name.startswith(("cpu", "fake:")) for name in options.devices)
    return min(processors(), AT_MOST["accelerator" if accelerator else "cpu"])


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def heading(config: pytest.Config) -> str:
    """Say in how many processes the run goes, and how a long one gets more."""
    if is_controller(config):
        return f"processes: {len(config.option.tx)}, then one for what is timed (-n 0: one for all)"
    if hasattr(config.option, "numprocesses") or processors() == 1:
        return "processes: 1"
    return f"processes: 1 of {processors()}; with pytest-xdist installed a long run uses all (pip install pytest-xdist)"


def _in_worker() -> bool:
    """Whether this is a worker of pytest-xdist or was started by one: the other workers use the processors."""
    return "PYTEST_XDIST_WORKER" in os.environ


def elsewhere(config: pytest.Config, alone: bool) -> bool:
    """Whether another process of the run runs a case: the controller what has to be alone, the workers all else."""
    return (is_worker(config) and alone) or (is_controller(config) and not alone)


class Alone:
    """The hooks of the controller that run what has to be alone when the workers have ended."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        if not self._run.left_to_the_controller:
            return result
        collected = session.testscollected
        with without_collections(), _quiet(session.config):
            session.perform_collect()
        session.testscollected += collected
        for item, following in zip(session.items, [*session.items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return result


def collected_here(session: pytest.Session, run: Run, contracts: Collection[str]) -> list[pytest.Item]:
    """Collect the cases of these contracts in the controller, beside the workers; what is known of the run stays."""
    before = session.items, session.testscollected
    run.sought = frozenset(contracts)
    try:
        with without_collections(), _quiet(session.config):
            session.perform_collect()
        return session.items
    finally:
        run.sought = None
        session.items, session.testscollected = before


@contextmanager
def _quiet(config: pytest.Config) -> Iterator[None]:
    """Keep pytest from reporting a second collection."""
    verbosity = config.option.verbose
    config.option.verbose = -1
    try:
        yield
    finally:
        config.option.verbose = verbosity


class Worker:
    """The hooks of an xdist worker: it judges cases and reports what it collected."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Take this worker's part of the threads; with more threads than processors each operation waits."""
        import torch

        count = session.config.workerinput["workercount"]  # type: ignore[attr-defined]
        torch.set_num_threads(max(1, torch.get_num_threads() // count))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.config.workeroutput["conformance"] = self._run.collection()  # type: ignore[attr-defined]


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while cases are made, and never what lives as long as the run: each time takes 0.3 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def collect_all_again() -> None:
    """End what `without_collections` did for the rest of the process: what is alive may be collected once it is not."""
    gc.unfreeze()
