"""What the tests of the suite share: a toy suite with contracts that hold and contracts that do not."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401  (kept loaded, so that runs inside this process need not import it again)
import pytest
import torch._dynamo

import conformance.harness.run  # noqa: F401  (likewise)
from conformance.harness import catalogue, header, items, targets, waivers
from conformance.harness.reproduction import definitions
from conformance.report import values
from tests import reports
from tests.faults import Fault
from tests.faults.campaigns.campaign import WITHOUT_COLLECTIONS

pytest_plugins = ("pytester",)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run leave out the faults of other shares."""
    parser.addoption(
        "--faults", type=_share, metavar="K/N", help="of the faults that must be caught run share K of N (1/N to N/N)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Know the marks of the checks, which some tests import."""
    items.register_marks(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which share of the faults a run has."""
    share = config.getoption("--faults")
    return share and "faults: share {} of {}".format(*share)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the faults of other shares; a fault stays in its share while others come and go."""
    share = config.getoption("--faults")
    if share is None:
        return
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        call = getattr(item, "callspec", None)
        fault = call.params.get("fault") if call else None
        kept[not isinstance(fault, Fault) or zlib.crc32(fault.name.encode()) % share[1] == share[0] - 1].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def _share(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(first), int(second)


_CONTRACT = """
[[contract]]
id = "{id}"
title = "{title}"
statement = "The statement of {id}."
level = "{level}"
authority = "{authority}"
source = "the toy suite"
failure = "The usual cause of {id}."
next_step = "The next step for {id}."
snippet = "print('$device', $amp_dtype, '{id}')"
"""


# Processes of their own know nothing of the toy suite but what a plugin puts in place.
_SPAWNED = """
import pathlib
from conformance.harness import catalogue, waivers
catalogue.FOLDER = pathlib.Path(__file__).parent / "chapters"
waivers.shipped = lambda known: ()
"""


OP_POLICY = {"cpu": values.OpPolicy("AutocastCPU", "bfloat16", {"lower_precision": ("mm",)})}
"""The autocast rules in the reports of toy suites."""


@dataclass(frozen=True)
class Outcome:
    """What a run of the suite came to: exit status, what was printed, and the report with its cases spelled out."""

    status: int
    output: str
    report: dict[str, Any]

    def verdicts(self) -> dict[str, str]:
        return {case["id"]: case["verdict"] for case in self.report["cases"]}


class Toy:
    """A suite of a few lines, run by the real plugin in this process."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = pytester.path
        self._pytester = pytester
        self._contracts: list[str] = []
        folder = self.path / "chapters"
        folder.mkdir()
        monkeypatch.setattr(catalogue, "FOLDER", folder)
        monkeypatch.setattr(waivers, "shipped", lambda known: ())
        # It takes half a second to observe them.
        monkeypatch.setattr(header, "op_policy", lambda run_targets: OP_POLICY)

    def contract(
        self, id: str, *, level: str = "must", authority: str = "documented", extra: str = "", title: str = ""
    ) -> None:
        """Add a contract; its chapter is read off its id."""
        chapter = id.split("-")[1].lower()
        path = self.path / "chapters" / chapter / catalogue.FILE
        if not path.exists():
            path.parent.mkdir()
            path.write_text(f'chapter = "{chapter}"\ntitle = "Toy {chapter}"\nsummary = "A toy chapter."\n')
        with path.open("a") as stream:
            title = title or f"The toy contract {id} holds"
            stream.write(_CONTRACT.format(id=id, title=title, level=level, authority=authority) + extra)

    def checks(self, source: str, name: str = "test_toy") -> None:
        """Write a module of checks."""
        header = (
            "from __future__ import annotations\n"
            "import pytest, torch\n"
            "from conformance.harness.check import Case, contract, deep\n"
            "from conformance.harness.targets import Target\n"
        )
        (self.path / f"{name}.py").write_text(header + source)

    def run(self, *arguments: str, report: str = "report", shuffled: bool = False) -> Outcome:
        """Run the toy suite, in the order of the file or in a random one."""
        # Another test's suite has the same name, and may have failed in this process.
        definitions._module.cache_clear()
        definitions._is_module.cache_clear()
        result = self._pytester.runpytest_inprocess(
            "-p",
            "conformance.harness.plugin",
            *(() if shuffled else ("-p", "no:randomly")),
            *WITHOUT_COLLECTIONS,
            "--report",
            report,
            *arguments,
        )
        path = self.path / report / "report.json"
        read = reports.written(path) if path.exists() else {}
        return Outcome(int(result.ret), "\n".join(result.outlines + result.errlines), read)

    def spawn(self, plugin: str, *arguments: str, report: str = "report") -> Outcome:
        """Run the toy suite in a process of its own, and its workers, each after the source `plugin`."""
        (self.path / "toyplugin.py").write_text(_SPAWNED + plugin)
        given = ["-p", "toyplugin", "-p", "conformance.harness.plugin", "--pyargs", "--report", report, *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
        root = Path(__file__).resolve().parent.parent
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *given],
            cwd=self.path,
            env={**environment, "PYTHONPATH": os.pathsep.join((str(self.path), str(root)))},
            capture_output=True,
            text=True,
            check=False,
        )
        path = self.path / report / "report.json"
        read = reports.written(path) if path.exists() else {}
        return Outcome(ended.returncode, ended.stdout + ended.stderr, read)


@pytest.fixture(autouse=True)
def _without_autocast() -> None:
    """Begin each test outside of a region: a generator of an earlier test sets the state anew where it is collected."""
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            torch.set_autocast_enabled(device_type, False)


@pytest.fixture
def toy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy suite in a folder of its own."""
    return Toy(pytester, monkeypatch)


def run_of(root: Path, folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> Outcome:
    """Run a module with its arguments in the checkout, at quick unless they say, with its report in `folder`."""
    plugins = ("-p", "no:cacheprovider", "-p", "no:randomly")
    level = () if "--level" in command else ("--level", "quick")
    done = subprocess.run(
        [sys.executable, "-m", *command, *level, *plugins, "--report", str(folder)],
        cwd=root,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    written = folder / "report.json"
    assert written.exists(), (done.stdout + done.stderr)[-3000:]
    return Outcome(done.returncode, done.stdout, reports.written(written))


def foreign_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `--device npu` name a device of a third party's type, with the CPU in its place."""
    resolve, probe = targets.resolve, targets._probe
    npu, cpu = targets.Target("npu:0", "npu", 0, is_fake=False), resolve("cpu")
    monkeypatch.setattr(targets, "resolve", lambda name: npu if name == "npu" else resolve(name))
    monkeypatch.setattr(targets, "_probe", lambda target: probe(cpu if target == npu else target))
    monkeypatch.setattr(targets.Target, "device", property(lambda target: torch.device("cpu")))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent
