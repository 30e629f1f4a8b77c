"""The whole way of a run on a simulated card: `pytest conformance --gpu`, from the accelerator found to the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.harness import measuring
from tests import reports
from tests.simulation.card import H100, slower
from tests.simulation.checks import machine

CONTRACTS = ("AMP-SPEED-001", "AMP-SPEED-009", "AMP-SPEED-030", "AMP-MEMORY-013", "AMP-MEMORY-019")


@pytest.fixture(autouse=True)
def _simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline counts real seconds, in which a machine that simulates gets less done than a card."""
    monkeypatch.setitem(measuring.DEADLINES["accelerator"], "quick", 300.0)


def verdicts(pytester: pytest.Pytester, root: Path) -> tuple[int, dict[str, set[str]]]:
    """Exit status of a quick run, and the verdicts of the cases of each contract."""
    report = pytester.path / "report"
    chosen = [argument for contract in CONTRACTS for argument in ("--contract", contract)]
    result = pytester.runpytest_inprocess(
        *(
            str(root / "conformance"),
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(root),
            "-c",
            str(root / "pyproject.toml"),
        ),
        *("--gpu", "--level", "quick", "--report", str(report), *chosen),
    )
    cases = reports.written(report / "report.json")["cases"]
    return int(result.ret), {id: {case["verdict"] for case in cases if case["contract"] == id} for id in CONTRACTS}


def test_a_clean_card_conforms(pytester: pytest.Pytester, root: Path) -> None:
    with machine(H100):
        status, seen = verdicts(pytester, root)
    assert seen == {id: {"PASS"} for id in CONTRACTS}
    assert status == 0


def test_a_slow_card_with_stuck_counters_does_not(pytester: pytest.Pytester, root: Path) -> None:
    with machine(H100, slower(8, lambda kernel: kernel.low)) as simulation:
        simulation.peaks_are_stuck = True
        status, seen = verdicts(pytester, root)
    assert (seen["AMP-SPEED-001"], seen["AMP-MEMORY-019"]) == ({"FAIL"}, {"FAIL"})
    assert seen["AMP-SPEED-009"] == {"PASS"}
    assert status == 1
