"""What the speed chapter's measurements are held to, under every kind of noise, by simulation with fixed seeds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.chapters.speed.paired_comparison import PLANS, Comparison
from tests.generators.operating_characteristics import here, in_blocks, in_fixed_order, measured, simulate
from tests.simulation.clocks import NOISES, Machine

TRIALS = 150


@pytest.mark.parametrize("noise", NOISES)
def test_operating_characteristics_at_standard(noise: str) -> None:
    seen = simulate(noise, TRIALS, PLANS["standard"])
    assert seen.told_apart <= 0.01 * TRIALS + 3 * math.sqrt(0.01 * TRIALS)  # of what is 1 % at most, by proof
    assert seen.equal["FAIL"] <= 0.01 * TRIALS
    assert seen.slower["FAIL"] >= 0.99 * TRIALS
    assert seen.slower["PASS"] == 0
    assert seen.covered >= 0.95 * 2 * TRIALS


@pytest.mark.parametrize("noise", NOISES)
def test_at_quick_nothing_is_claimed_that_is_not_so(noise: str) -> None:
    seen = simulate(noise, TRIALS, PLANS["quick"])
    assert seen.equal["FAIL"] <= 0.01 * TRIALS
    assert seen.slower["PASS"] == 0
    assert seen.covered >= 0.95 * 2 * TRIALS


@pytest.mark.parametrize("noise", ["scatter of 2 %", "drift of 5 %", "one outlier in ten", "recorded"])
def test_twice_as_fast_and_a_fifth_slower_are_told_even_at_quick(noise: str) -> None:
    plan = PLANS["quick"]
    for trial in range(50):
        for slower in (0.5, 1.3):
            speedup = measured(noise, f"{trial}", plan, slower).speedup
            assert speedup.judge(1.0) is not (slower > 1)


@pytest.mark.parametrize("budget", [0.02, 0.05, 0.2])
def test_a_budget_that_runs_out_does_not_spoil_the_coverage(budget: float) -> None:
    plan = replace(PLANS["standard"], width=0.0, budget=budget)
    covered = 0
    for trial in range(400):
        seen = measured("one outlier in ten", f"budget {trial}", plan, 1.5).speedup
        covered += seen.low <= 1 / 1.5 <= seen.high
    assert covered >= 0.95 * 400


@pytest.mark.parametrize("noise", ["drift of 5 %", "two clocks, ten runs each"])
def test_arms_in_blocks_are_fooled(noise: str) -> None:
    """The control: what the simulation would say of a protocol that is wrong."""
    wrong = [in_blocks(noise, f"{trial}", 36) for trial in range(100)]
    assert sum(not seen.low <= 1 <= seen.high for seen in wrong) > 15


def test_a_fixed_order_is_fooled_by_a_rhythm_like_its_own() -> None:
    wrong = [in_fixed_order("rhythm of four runs", f"{trial}", 36) for trial in range(100)]
    assert sum(not seen.low <= 1 <= seen.high for seen in wrong) > 30


def test_looking_after_every_pair_would_find_differences_that_are_not_there() -> None:
    """What the division of the error among the looks is for."""
    fooled = 0
    for trial in range(200):
        machine = Machine(NOISES["scatter of 2 %"](random.Random(trial)))
        work = machine.work(1.0)
        times = [(machine.seconds(work), machine.seconds(work)) for _ in range(100)]
        first, second = zip(*times, strict=True)
        seen = (Comparison(first[:pairs], second[:pairs]).speedup for pairs in range(8, 101))
        fooled += any(not each.low <= 1 <= each.high for each in seen)
    assert fooled >= 3 * 0.01 * 200  # thrice what is allowed


def test_pairs_that_are_too_few_for_their_confidence_would_be_noticed() -> None:
    """The other control: intervals of 50 % fail what is asked of those of 99 %."""
    covered = 0
    for trial in range(200):
        machine = Machine(NOISES["scatter of 2 %"](random.Random(trial)))
        work = machine.work(1.0)
        pairs = [(machine.seconds(work), machine.seconds(work)) for _ in range(20)]
        first, second = zip(*pairs, strict=True)
        speedup = Comparison(first, second, "most", 0.5).speedup
        covered += speedup.low <= 1 <= speedup.high
    assert covered < 0.9 * 200


def test_measuring_here_is_told_in_a_line() -> None:
    plan = replace(PLANS["quick"], most=9)
    assert here(2, plan).startswith("2 measurements: ")


@pytest.mark.parametrize("level", PLANS)
def test_the_page_tells_the_plans(root: Path, level: str) -> None:
    page = (root / "docs" / "measuring.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {level} |"))
    _, _, looks, width, budget, confidence, _ = (cell.strip() for cell in row.split("|"))
    plan = PLANS[level]
    assert tuple(int(look) for look in looks.split(", ")) == plan.looks
    assert width == f"{plan.width:.0%}".replace("%", " %")
    assert float(budget) == plan.budget
    assert confidence == f"{plan.confidence * 100:.4g} %"


def test_the_page_shows_every_kind_of_noise(root: Path) -> None:
    page = (root / "docs" / "measuring.md").read_text(encoding="utf-8")
    table = page.partition("<!-- simulated -->")[2].partition("<!-- end of simulated -->")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == list(NOISES)
