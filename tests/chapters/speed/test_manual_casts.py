"""Test the verdict where there are too few pairs for an interval: disjoint arms decide."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

from conformance.chapters.speed.paired_comparison import Comparison
from conformance.chapters.speed.timing import Timing
from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation, Inconclusive
from conformance.harness.targets import resolve

BY_HAND = (1.0, 1.1, 1.9, 1.2, 1.0)
MANY = 40  # pairs, enough for an interval


@pytest.fixture
def checks() -> ModuleType:
    """The module of the checks."""
    return importlib.import_module("conformance.chapters.speed.test_manual_casts")


def _case() -> Case:
    return Case(load().contracts["AMP-SPEED-050"], level="quick", seed=0, substitutions={})


def _judged(
    checks: ModuleType,
    region: tuple[float, ...],
    manual: tuple[float, ...] = BY_HAND,
    *,
    floor: float = math.inf,
    invalid: str | None = None,
) -> Case:
    case = _case()
    seen = Comparison(region, manual)
    checks._judge(case, Timing(seen, floor, invalid, {}), seen, 1.25)
    return case


def test_a_region_that_is_slower_throughout_fails(checks: ModuleType) -> None:
    with pytest.raises(ContractViolation, match="fastest run in a region over the slowest with manual casts"):
        _judged(checks, tuple(3 * seconds for seconds in BY_HAND))


@pytest.mark.parametrize("pairs", [0, 1, 4])
def test_too_few_pairs_tell_nothing(checks: ModuleType, pairs: int) -> None:
    with pytest.raises(Inconclusive, match=f"there were {pairs} pairs"):
        _judged(checks, tuple(3 * seconds for seconds in BY_HAND[:pairs]), BY_HAND[:pairs])


def test_arms_that_overlap_tell_nothing(checks: ModuleType) -> None:
    with pytest.raises(Inconclusive, match="too few for an interval"):
        _judged(checks, tuple(1.5 * seconds for seconds in BY_HAND))


def test_the_fastest_runs_pass(checks: ModuleType) -> None:
    case = _judged(checks, (1.1, 4.0, 5.0, 1.3, 1.2))
    assert case.evidence[-1].measured == pytest.approx(1.1)


@pytest.mark.parametrize(("slower", "told"), [(1.0, "high end"), (1.2, "high end")])
def test_an_interval_passes(checks: ModuleType, slower: float, told: str) -> None:
    case = _judged(checks, (slower,) * MANY, (1.0,) * MANY, floor=0.01)
    assert case.evidence[-1].name.startswith(told)


def test_an_interval_fails(checks: ModuleType) -> None:
    with pytest.raises(ContractViolation, match="low end of the time in a region"):
        _judged(checks, (1.4,) * MANY, (1.0,) * MANY, floor=0.01)


def test_what_was_spoiled_passes_by_its_fastest_runs(checks: ModuleType) -> None:
    case = _judged(checks, (1.0,) + (1.5,) * MANY, (1.0,) * (MANY + 1), floor=0.01, invalid="heat")
    assert case.evidence[-1].name.startswith("fastest run in a region over the fastest with manual casts")


def test_what_was_spoiled_fails_nothing(checks: ModuleType) -> None:
    with pytest.raises(Inconclusive, match="heat"):
        _judged(checks, (3.0,) * MANY, (1.0,) * MANY, floor=0.01, invalid="heat")


@pytest.mark.parametrize("waits", [None, (0, 0), (4, 4), (8, 8), (8, 5)])
def test_waits_that_others_make_fail_nothing(checks: ModuleType, waits: tuple[int, int] | None) -> None:
    assert not checks._blocks(waits)
    checks._judge_waits(_case(), waits)


@pytest.mark.parametrize("manual", [0, 4])
def test_waits_of_the_region_alone_fail(checks: ModuleType, manual: int) -> None:
    assert checks._blocks((5, manual))
    with pytest.raises(ContractViolation, match="in which the region blocks"):
        checks._judge_waits(_case(), (5, manual))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts waits by thread on Linux alone")
def test_waits_of_a_thread_are_counted(checks: ModuleType) -> None:
    assert checks._runs_that_wait(lambda: threading.Event().wait(1e-3), lambda: None) == (checks.RUNS, 0)


@pytest.mark.parametrize(
    ("region", "floor", "invalid", "slow"),
    [(1.4, 0.01, None, True), (1.2, 0.01, None, False), (3.0, math.inf, None, True), (3.0, 0.01, "heat", False)],
)
def test_what_is_too_slow_is_told(
    checks: ModuleType, region: float, floor: float, invalid: str | None, slow: bool
) -> None:
    seen = Comparison((region,) * MANY, (1.0,) * MANY)
    assert checks._is_slow(Timing(seen, floor, invalid, {}), 1.25) is slow


@pytest.mark.parametrize(("disturbed", "fails"), [(0, False), (2, False), (3, True)])
@pytest.mark.parametrize("how", ["slow", "blocking"])
def test_a_disturbance_passes(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str, disturbed: int, fails: bool
) -> None:
    measured: list[bool] = []

    def compare(*_: object) -> Timing:
        measured.append(len(measured) < disturbed)
        region = 1.4 if measured[-1] and how == "slow" else 1.0
        return Timing(Comparison((region,) * MANY, (1.0,) * MANY), 0.01, None, {})

    def waits(*_: object) -> tuple[int, int]:
        return 8 * (measured[-1] and how == "blocking"), 0

    monkeypatch.setattr(checks, "_compare", compare)
    monkeypatch.setattr(checks, "_runs_that_wait", waits)
    with pytest.raises(ContractViolation) if fails else nullcontext():
        checks.test_a_region_takes_the_time_of_its_casts(
            _case(), resolve("cpu"), torch.bfloat16, torch.Generator(), "linear"
        )
    assert len(measured) == min(disturbed + 1, checks.MEASUREMENTS)


class _Clock:
    """A clock whose runs take the given seconds in turn."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def seconds(self, work: object) -> float:
        return self.left.pop(0)


def test_further_runs_end_when_the_fastest_decide(checks: ModuleType) -> None:
    case, busy = _case(), Comparison((3.0, 4.0), (1.0, 2.0))
    assert checks._is_undecided(Timing(busy, math.inf, None, {}), 1.25)
    every = checks._further_runs(case, _Clock(1.5, 2.0, 1.1, 1.2), busy, None, None, 1.25)
    assert every == Comparison((3.0, 4.0, 2.0, 1.2), (1.0, 2.0, 1.5, 1.1))
    assert case.evidence[-1].measured == 2
    checks._judge(case, Timing(busy, math.inf, None, {}), every, 1.25)
    assert case.evidence[-1].measured == pytest.approx(1.2)


def test_comparison_without_time_for_a_pair_goes_on(checks: ModuleType) -> None:
    case, nothing = _case(), Comparison((), ())
    assert checks._is_undecided(Timing(nothing, math.inf, None, {}), 1.25)
    every = checks._further_runs(case, _Clock(1.5, 2.0, 1.5, 1.6), nothing, None, None, 1.25)
    assert every == Comparison((2.0, 1.6), (1.5, 1.5))


@pytest.mark.parametrize(("seen", "undecided"), [((1.4,) * MANY, False), ((1.0,) * MANY, False), ((1.2,), False)])
def test_what_is_decided_needs_no_further_runs(checks: ModuleType, seen: tuple[float, ...], undecided: bool) -> None:
    taken = Timing(Comparison(seen, (1.0,) * len(seen)), 0.01, None, {})
    assert checks._is_undecided(taken, 1.25) is undecided
