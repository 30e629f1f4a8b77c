"""One run of the suite, in this process, while torch is broken."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch._subclasses import FakeTensorMode

from conformance.harness import catalogue, header, parallel, reporting, state, waivers
from conformance.harness.reproduction import program
from conformance.harness.run import Run
from conformance.oracles.policy.fake_mode import fake_mode
from conformance.report import document
from conformance.report.values import Report
from tests import reports
from tests.faults import Fault
from tests.faults.breaking import replaced
from tests.faults.plugin import First
from tests.paths import ROOT
from tests.workloads import example

CHECKS = ROOT / "conformance" / "chapters"

_CHECK = re.compile(r"conformance\.chapters\.\w+\.test_\w+")
# pytest collects garbage five times at the end of a run, to warn of what a destructor raised: half of a short run.
WITHOUT_COLLECTIONS = ("-p", "no:unraisableexception")
# Plugins that are installed beside pytest, and asserts rewritten, would take more of a run than most faults.
PLAIN = (*WITHOUT_COLLECTIONS, "-p", "no:cacheprovider", "--assert", "plain")
# The same for every fault, so it is read once.
_catalogue = functools.cache(catalogue.load)
_shipped = functools.cache(lambda read=waivers.shipped: read(_catalogue().contracts))
# What lived before a fault is frozen once: a run that thaws it would have the collection after it search all of torch.
_COLLECTOR = SimpleNamespace(**{**vars(gc), "freeze": lambda: None, "unfreeze": lambda: None})


def _unread(run_targets: object) -> None:
    """Leave the op policy out of the header: nothing of it is judged, and reading it takes longer than most faults."""


def _unwritten(*case: object) -> str:
    """Write no program of a failed case: that takes a third of the time of most faults."""
    return ""


@dataclass(frozen=True)
class Caught:
    """What a run on a broken torch came to."""

    fault: Fault
    status: int
    failed: frozenset[str]
    errors: frozenset[str]
    output: str
    cases: tuple[dict[str, Any], ...] = ()
    report: Report | None = None

    @property
    def caught(self) -> bool:
        """Whether the run failed, by a contract that speaks of the fault."""
        return self.status == 1 and bool(speaking(self.fault, self.failed))

    def cases_of(self, contract: str) -> list[dict[str, Any]]:
        """The failed cases of a contract, as the report has them."""
        return [case for case in self.cases if case["contract"] == contract and case["verdict"] == "FAIL"]


def speaking(fault: Fault, contracts: Collection[str]) -> list[str]:
    """Those of the contracts that speak of the fault."""
    return [one for one in contracts if any(fnmatchcase(one, pattern) for pattern in fault.contracts)]


def run(
    fault: Fault,
    *,
    chapters: tuple[str, ...] | None = None,
    until_caught: bool = False,
    first: str = "",
    programs: bool = False,
) -> Caught:
    """Run the contracts that speak of the fault, or all of `chapters` (none named: every one), on a broken torch.

    `until_caught` ends the run with the first failure; the case `first` is then run before the others. With `programs`
    the failed cases have their snippets.
    """
    places = modules(fault.contracts) if chapters is None else [str(CHECKS)]
    option, chosen = ("--contract", fault.contracts) if chapters is None else ("--chapter", chapters)
    asked = [argument for name in chosen for argument in (option, name)]
    if fault.apart:
        order = ["--first", first] if first else []
        return _apart(fault, [*places, *(["--maxfail=1"] if until_caught else []), *order, *asked])
    output = io.StringIO()
    # A region that is broken leaks its state into this process, already in the smoke stage.
    whole = state.Snapshot()
    gc.freeze()  # what is here already need not be searched at the end
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*places, "-q", *PLAIN, "--level", fault.level, *(["--maxfail=1"] if until_caught else [])]
        if fault.machine == "model":
            arguments += ["--workload", f"{example.written(Path(folder))}:build", "--device", "cpu"]
        try:
            with (
                fault.applied(),
                contextlib.redirect_stdout(output),
                fresh_checks(),
                _lean(programs),
            ):
                status = int(pytest.main([*arguments, "--report", f"{folder}/report", *asked], plugins=[First(first)]))
        finally:
            # A suspended generator leaves its region where it is collected, and sets what was in force around it.
            gc.collect()
            gc.unfreeze()
            whole.restore()
        return _caught(fault, status, output.getvalue(), Path(folder) / "report")


_MACHINES = {
    "card": ("tests.simulation.emulated", "--gpu"),
    "backend": (
        *("pytest", "-p", "tests.faults.plugin", "--import", "tests.simulation.foreign.toyacc"),
        *("--device", "toyacc", "--op-policy", "like:cuda"),
    ),
}


def _apart(fault: Fault, arguments: Sequence[str]) -> Caught:
    """Run those contracts on another machine, in a process that has the fault."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *_MACHINES[fault.machine], *arguments, "-q", *PLAIN]
        done = subprocess.run(
            [*command, "--fault", fault.name, "--level", fault.level, "--report", folder],
            cwd=ROOT,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return _caught(fault, done.returncode, done.stdout + done.stderr, Path(folder))


def _caught(fault: Fault, status: int, output: str, folder: Path) -> Caught:
    """Read what a run came to from its folder."""
    path = folder / "report.json"
    cases = reports.written(path)["cases"] if path.exists() else []
    return Caught(
        fault,
        status,
        frozenset(case["contract"] for case in cases if case["verdict"] == "FAIL"),
        frozenset(case["contract"] for case in cases if case["verdict"] == "ERROR"),
        output,
        tuple(cases),
        document.read(path) if path.exists() else None,
    )


@contextlib.contextmanager
def _lean(programs: bool) -> Iterator[None]:
    """Leave out of a run what judges nothing, and read once what is the same for every fault."""
    with (
        replaced(catalogue, "load", _catalogue),
        replaced(waivers, "shipped", lambda known: _shipped()),
        contextlib.nullcontext() if programs else replaced(program, "of", _unwritten),
        replaced(header, "op_policy", _unread),
        replaced(header, "replaced_functions", dict),
        replaced(header, "torch_backends", dict),
        replaced(parallel, "gc", _COLLECTOR),
        replaced(reporting, "gc", _COLLECTOR),
        replaced(Run, "autocast_kernels", {}),
        mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
    ):
        yield


def modules(patterns: Collection[str]) -> list[str]:
    """The modules that check a contract of those patterns."""
    return [
        str(path)
        for path, contracts in _checked().items()
        if any(fnmatchcase(contract, pattern) for contract in contracts for pattern in patterns)
    ]


@functools.cache
def _checked() -> dict[Path, list[str]]:
    return {path: re.findall(r'^@contract\("([^"]+)"', path.read_text(), re.M) for path in CHECKS.glob("*/test_*.py")}


@contextlib.contextmanager
def fresh_checks() -> Iterator[None]:
    """Let a run begin as a user's would, with torch already broken: it imports the checks, and remembers no fake op.

    What was imported before is put back at the end.
    """
    before = _checks()
    for name in before:
        del sys.modules[name]
    _forget_fake_ops()
    try:
        yield
    finally:
        for name in _checks():
            del sys.modules[name]
        sys.modules.update(before)
        _forget_fake_ops()


def _forget_fake_ops() -> None:
    fake_mode.cache_clear()
    FakeTensorMode.cache_clear()  # which all modes share


def _checks() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if _CHECK.fullmatch(name)}
