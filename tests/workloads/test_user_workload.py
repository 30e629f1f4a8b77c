"""The contracts about a workload of the user's own: the documented example holds, broken models and AMPs are caught."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.__main__ import main
from conformance.harness.measuring import DEADLINES
from tests.faults.breaking import dropped, replaced
from tests.workloads.conftest import Runner


def _failed(report: dict[str, Any]) -> set[str]:
    return {case["contract"] for case in report["cases"] if case["verdict"] == "FAIL"}


def test_the_documented_example_holds(runner: Runner, root: Path) -> None:
    report = runner.run()

    page = (root / "docs" / "own-workloads.md").read_text(encoding="utf-8")
    assert report["footer"]["overall"] == "CONFORMANT"
    assert set(report["footer"]["contracts"]) == set(re.findall(r"^\| (AMP-\S+) \|", page, re.MULTILINE))


def test_a_speedup_is_explained(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEADLINES["cpu"], "quick", 300.0)  # a busy machine takes longer for as many pairs
    report = runner.run(contract="AMP-SPEED-020")

    told = [dict(row["measured"]) for case in report["cases"] for row in case["evidence"] if row["unit"] == "speed-up"]
    assert told
    for figures in told:
        assert figures["noise"] >= 0
        assert figures["low"] <= figures["ratio"] <= figures["high"]
        assert re.match(r"step .*, casts \d+%, fp32 list \d+%.*: ", figures["diagnosis"])


_HEAD = "import torch\n\n\ndef build"
_MODEL = "model = torch.nn.Sequential("
_LOSS = '"loss": torch.nn.functional.cross_entropy'


def _module(forward: str) -> tuple[str, str]:
    """An edit that puts a module with this `forward` in front of the model; `SEEN` is a list of the module."""
    source = (
        "import torch\nSEEN = []\n\n\nclass Odd(torch.nn.Module):\n"
        f"    def forward(self, x):\n        on = torch.is_autocast_enabled('cpu')\n{forward}\n\n\ndef build"
    )
    return _HEAD, source


@pytest.mark.parametrize(
    ("contract", "edits"),
    [
        ("AMP-LOSS-018", [(_LOSS, '"loss": lambda o, t: (o * torch.ones_like(o)).pow(2).mean()')]),
        ("AMP-LOSS-018", [(_LOSS, '"loss": lambda o, t: (o - o.amax(1, keepdim=True)).abs().mul(o).sum().float()')]),
        ("AMP-PARITY-051", [(_MODEL, f"{_MODEL}Odd(), "), _module("        return x * 1e5 if on else x")]),
        (
            "AMP-MEMORY-020",
            [
                (_MODEL, f"{_MODEL}Odd(), "),
                _module("        if on:\n            SEEN.append(x.clone())\n        return x"),
            ],
        ),
        (
            "AMP-REGION-101",
            [
                (_MODEL, f"{_MODEL}Odd(), "),
                _module("        if on:\n            SEEN.append(1)\n        return x + len(SEEN)"),
            ],
        ),
    ],
    ids=["loss-dtype", "loss-value", "overflow", "leak", "state"],
)
def test_a_model_that_breaks_a_contract_is_told(runner: Runner, contract: str, edits: list[tuple[str, str]]) -> None:
    assert _failed(runner.run(*edits, contract=contract)) == {contract}


@contextlib.contextmanager
def _no_rule() -> Iterator[None]:
    with dropped("linear", "AutocastCPU"), dropped("addmm", "AutocastCPU"):
        yield


def test_what_overflows_is_named(runner: Runner) -> None:
    edits = [(_MODEL, f"{_MODEL}Odd(), "), _module("        return x * 1e5 if on else x")]

    report = runner.run(*edits, contract="AMP-PARITY-051")

    reasons = [case["reason"] for case in report["cases"] if case["verdict"] == "FAIL"]
    assert reasons
    assert all("forward, module '1'" in reason for reason in reasons), reasons


def _never_off() -> AbstractContextManager[None]:
    return replaced(torch.autocast, "__exit__", lambda self, *error: False)


def _steps_backwards() -> AbstractContextManager[None]:
    right = torch.amp.GradScaler.unscale_

    def unscale(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        right(self, optimizer)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight in weights if self.is_enabled() else ():
            weight.grad = -weight.grad

    return replaced(torch.amp.GradScaler, "unscale_", unscale)


@pytest.mark.parametrize(
    ("contract", "broken"),
    [
        ("AMP-REGION-100", _no_rule),
        ("AMP-REGION-101", _never_off),
        ("AMP-PARITY-050", _steps_backwards),
    ],
    ids=["no-rule", "never-off", "backwards"],
)
def test_a_broken_amp_is_told(
    runner: Runner, contract: str, broken: Callable[[], AbstractContextManager[None]]
) -> None:
    with broken():
        report = runner.run(contract=contract)

    assert _failed(report) == {contract}


def _raises_in_a_region() -> list[tuple[str, str]]:
    return [(_MODEL, f"{_MODEL}Odd(), "), _module("        return x.nothing if on else x")]


def test_what_the_model_raises_in_a_region_has_its_line(runner: Runner) -> None:
    report = runner.run(*_raises_in_a_region(), contract="AMP-REGION-100")

    reasons = {case["reason"] for case in report["cases"]}
    assert reasons == {"raised AttributeError: 'Tensor' object has no attribute 'nothing' (mine.py, line 8)"}
    assert _failed(report) == {"AMP-REGION-100"}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytest_benchmark")
    # By this pytest-benchmark knows one of xdist's workers, which these tests may run in and their runs do not.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def test_times_of_a_step_go_to_a_file_of_benchmarks(
    runner: Runner, benchmarks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEADLINES["cpu"], "quick", 300.0)
    report = runner.run(contract="AMP-SPEED-020", arguments=("--benchmark-json", "times.json"))

    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"own/step/fp16/fp32: AMP is [\d.]+ \[[\d.]+, [\d.]+\] times as fast", printed)

    written = json.loads((runner.pytester.path / "times.json").read_text())["benchmarks"]
    told = [dict(row["measured"]) for case in report["cases"] for row in case["evidence"] if row["unit"] == "speed-up"]
    assert {one["name"] for one in written} == {f"test_step_against_fp32[device-{dtype}]" for dtype in ("fp16", "bf16")}
    for one in written:
        assert one["extra_info"]["workload"] == "mine.py:build"
        assert one["extra_info"]["ratio"] in [figures["ratio"] for figures in told]
        assert one["stats"]["median"] == pytest.approx(one["extra_info"]["AMP ms"] / 1e3)


def test_a_model_that_raises_in_a_region_has_no_times(
    runner: Runner, benchmarks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--benchmark-json", "times.json")
    report = runner.run(*_raises_in_a_region(), contract="AMP-SPEED-020", arguments=arguments)

    (reason,) = {case["reason"] for case in report["cases"]}
    assert {case["verdict"] for case in report["cases"]} == {"UNTESTABLE"}
    assert "AMP-REGION-100 judges: AttributeError: 'Tensor' object has no attribute 'nothing' (mine.py, line" in reason
    assert not (runner.pytester.path / "times.json").exists()


def test_speed_of_a_model_alone_is_nothing_to_calibrate_by(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEADLINES["cpu"], "quick", 300.0)
    runner.run(contract="AMP-SPEED-020")
    capsys.readouterr()

    assert main(["calibrate", str(runner.pytester.path / "report"), "-o", "fleet.toml"]) == 4

    said = " ".join(capsys.readouterr().err.split())
    assert "only a model of a user (--workload) was timed" in said
    assert "--chapter speed without --workload" in said
