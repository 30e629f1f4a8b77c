"""A region beside its casts by hand, where there were too few pairs for an interval: arms without an overlap tell."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest

from conformance.harness.catalogue import load
from conformance.harness.check import Case, ContractViolation, Inconclusive
from conformance.measure.comparison import Comparison
from conformance.measure.intervals import Interval

NOTHING = Interval(math.nan, 0.0, math.inf, 1.0)
BY_HAND = (1.0, 1.1, 1.9, 1.2, 1.0)


@pytest.fixture
def checks(pytestconfig: pytest.Config) -> ModuleType:
    """The module of the check; its markers are made known here, as the suite's plugin is not loaded."""
    for marker in ("contract", "depth", "timed"):
        pytestconfig.addinivalue_line("markers", f"{marker}: of the suite")
    return importlib.import_module("conformance.test_speed_by_hand")


def _judged(checks: ModuleType, region: tuple[float, ...], by_hand: tuple[float, ...] = BY_HAND) -> Case:
    case = Case(load().contracts["AMP-SPEED-050"], level="quick", seed=0, substitutions={})
    checks._judge(case, Comparison(by_hand, region), NOTHING, 1.25)
    return case


def test_a_region_that_is_slower_throughout_fails(checks: ModuleType) -> None:
    with pytest.raises(ContractViolation, match="fastest run in a region over the slowest by hand"):
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
