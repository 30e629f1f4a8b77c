"""Intervals of ratios: order statistics against the tables, what an interval decides, and noise floors."""

from __future__ import annotations

import math

import pytest

from conformance.chapters.speed.intervals import Interval, median_ratio, noise_floor, order_statistic


@pytest.mark.parametrize(
    ("samples", "k", "coverage"), [(6, 1, 0.96875), (20, 6, 0.9586), (30, 10, 0.9572), (50, 18, 0.9672)]
)
def test_order_statistics_match_the_tables(samples: int, k: int, coverage: float) -> None:
    seen_k, seen_coverage = order_statistic(samples, 0.95)
    assert seen_k == k
    assert seen_coverage == pytest.approx(coverage, abs=1e-4)


@pytest.mark.parametrize(("samples", "confidence"), [(5, 0.95), (7, 0.99)])
def test_too_few_samples_have_no_order_statistic(samples: int, confidence: float) -> None:
    with pytest.raises(ValueError, match=f"{samples} samples are too few"):
        order_statistic(samples, confidence)


def test_median_ratio_of_known_numbers() -> None:
    seen = median_ratio([2.0] * 7 + [4.0], [1.0] * 8)
    assert (seen.low, seen.estimate, seen.high) == pytest.approx((2.0, 2.0, 4.0))
    assert seen.coverage == 1 - 2 / 2**8


@pytest.mark.parametrize("pairs", [1, 7])
def test_too_few_pairs_decide_nothing(pairs: int) -> None:
    seen = median_ratio([2.0] * pairs, [1.0] * pairs)
    assert (seen.low, seen.estimate, seen.high) == pytest.approx((0.0, 2.0, math.inf))
    assert [seen.judge(threshold) for threshold in (1e-9, 1.0, 1e9)] == [None] * 3
    assert seen.width == math.inf
    assert noise_floor(seen) == math.inf


def test_no_pairs_have_no_estimate() -> None:
    assert math.isnan(median_ratio([], []).estimate)


@pytest.mark.parametrize(("threshold", "verdict"), [(1.9, True), (2.0, True), (3.0, None), (4.0, None), (4.1, False)])
def test_an_interval_decides_or_does_not(threshold: float, verdict: bool | None) -> None:
    assert Interval(3.0, 2.0, 4.0, 0.99).judge(threshold) is verdict


@pytest.mark.parametrize(("low", "high", "floor"), [(0.9, 1.05, 1 / 0.9), (0.99, 1.2, 1.2), (1.1, 1.2, 1.2), (1, 1, 1)])
def test_a_floor_is_what_two_equal_arms_may_differ_by(low: float, high: float, floor: float) -> None:
    assert noise_floor(Interval(1.0, low, high, 0.99)) == pytest.approx(math.log(floor))


def test_a_floor_makes_an_interval_wider() -> None:
    seen = Interval(2.0, 1.9, 2.2, 0.99).widened(math.log(1.1))
    assert (seen.low, seen.estimate, seen.high) == pytest.approx((1.9 / 1.1, 2.0, 2.2 * 1.1))
    assert Interval(2.0, 1.9, 2.2, 0.99).widened(math.inf).judge(1e-9) is None
