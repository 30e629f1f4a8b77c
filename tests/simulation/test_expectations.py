"""Expectations on simulated cards: the suite's own on cards that reach half of their peaks, and a fleet's on itself."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.harness import expectations
from conformance.report import speed
from tests import reports
from tests.simulation.card import GIB, H100, T4, Card, Disturbance, slower
from tests.simulation.checks import Outcome, checks, machine, parameters, run

KEY = "matmul/compute/bf16/fp32"
# Cards with little power for their peaks, or little bandwidth for their casts: the hardest of their classes.
A100 = Card(
    *("NVIDIA A100-PCIE-40GB", (8, 0), 108, 1.41e9, 39 * GIB, 40 << 20, 0.8 * 1.555e12, 1.8e13, 0.6 * 156e12),
    *(0.6 * 312e12,),
)
A10 = Card(
    *("NVIDIA A10", (8, 6), 72, 1.695e9, 22 * GIB, 6 << 20, 0.8 * 6e11, 0.55 * 3.12e13, 0.55 * 62.5e12, 0.5 * 125e12)
)
L4 = Card("NVIDIA L4", (8, 9), 58, 2.04e9, 22 * GIB, 48 << 20, 0.8 * 3e11, 0.55 * 3.03e13, 0.5 * 60e12, 0.5 * 121e12)
TODAY = datetime.date(2026, 12, 1)
NOTHING = expectations.Expectations((), ())


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day on which what is tried is in force."""
    # Imported late: the marks of the checks are registered by a fixture.
    from conformance.chapters.speed import verdict as rulings

    monkeypatch.setattr(expectations, "date_of_today", lambda: TODAY)
    monkeypatch.setattr(rulings, "today", lambda: TODAY)


def _run(
    check: str,
    case: str,
    expected: expectations.Expectations,
    seed: int,
    *disturbances: Disturbance,
    card: Card = H100,
) -> Outcome:
    from conformance.chapters.speed.experiment import Experiments

    found = checks("speed.test_speedups")[check]
    given = next(one for one in parameters(found, "standard", ("fp16", "bf16")) if one["id"] == case)
    with machine(card, *disturbances, seed=seed) as simulation:
        return run(found, {"measured": Experiments(), **given}, simulation, level="standard", expected=expected)


def _judged(expected: expectations.Expectations, seed: int, *disturbances: Disturbance) -> Outcome:
    return _run("test_matmul_against_fp32", "matmul_against_fp32-bf16", expected, seed, *disturbances)


def _report(folder: Path, outcome: Outcome) -> str:
    """The sample of a conformant run, as if on the simulated card, with what the outcome measured."""
    raw = reports.raw("conformant")
    target = next(target for target in raw["header"]["targets"] if not target["fake"])
    case = next(case for case in raw["cases"] if case["target"] == target["name"])
    case["target"] = "cuda:0"
    raw["header"]["targets"].append(
        {**target, "name": "cuda:0", "device_type": "cuda", "probe": {"name": H100.name, "capability": "9.0"}}
    )
    case["evidence"] += [
        {key: getattr(one, key) for key in ("name", "measured", "relation", "bound", "unit", "holds")}
        for one in outcome.evidence
        if one.unit == speed.UNIT
    ]
    raw["header"]["started"] = "2026-11-21T12:00:00+00:00"
    path = folder / "report.json"
    path.write_text(json.dumps(raw))
    return str(path)


@pytest.mark.parametrize("subject", ["matmul", "linear"])
@pytest.mark.parametrize("card", [H100, A100, A10, L4, T4], ids=lambda card: card.name)
def test_the_suites_own_factors_hold_on_the_cards_that_they_are_for(card: Card, subject: str) -> None:
    case = f"operations_as_expected-{subject}-fp16"

    def judged(*disturbances: Disturbance) -> str:
        return _run("test_operations_as_expected", case, expectations.load(), 1, *disturbances, card=card).verdict

    assert judged() == "PASS"
    # All of the gain lost: AMP takes at least as long as fp32.
    assert judged(slower(card.low / card.fp32, lambda kernel: kernel.low)) == "FAIL"


def test_a_fleet_is_judged_by_its_own_machine(tmp_path: Path) -> None:
    measured = _run("test_operations", "operations-matmul-compute-fp32-bf16", NOTHING, 1)
    fleet = tmp_path / "fleet.toml"
    (figures,) = (dict(one.measured) for one in measured.evidence if one.unit == speed.UNIT)
    assert {"noise", "pairs", "AMP TFLOP/s", "baseline TFLOP/s"} <= set(figures)

    assert main(["calibrate", _report(tmp_path, measured), "-o", str(fleet)]) == 0

    expected = expectations.load([fleet])
    (calibrated,) = expectations.read(fleet)
    assert calibrated.reached == pytest.approx(
        {"bf16": figures["AMP TFLOP/s"], "fp32": figures["baseline TFLOP/s"]}, 1e-3
    )
    # The factor is the low end of one run's interval, in which a later run's ratio now and then lies.
    verdicts = [_judged(expected, seed).verdict for seed in range(2, 8)]
    assert set(verdicts) <= {"PASS", "INCONCLUSIVE"}
    assert verdicts.count("PASS") >= 4
    lost = _judged(expected, 4, slower(1.3, lambda kernel: kernel.low))
    assert (lost.verdict, "calibrated" in str(lost.evidence)) == ("FAIL", True)
    # By the published factor alone nobody would have noticed.
    assert _judged(expectations.load(), 4, slower(1.3, lambda kernel: kernel.low)).verdict == "PASS"


def test_what_is_not_whole_is_said_under_the_names_that_calibrate_reads() -> None:
    from conformance.chapters.speed.experiment import Experiments
    from conformance.commands import calibrate

    held = Experiments()
    found = checks("speed.test_speedups")["test_operations"]
    given = next(one for one in parameters(found, "quick", ("bf16",)) if "compute" in one["id"])
    with machine(H100) as simulation:
        run(found, {"measured": held, **given}, simulation)
    (measurement,) = held._measured.values()

    told = dataclasses.replace(measurement, shrink=2, invalid="the machine is busy").reported()

    assert (told[calibrate._HALVED], told[calibrate._SPOILED]) == (2, "the machine is busy")
    assert {calibrate._NOISE, calibrate._PAIRS, *calibrate._RATES} <= set(told)
