"""Intervals: a median ratio with exact confidence bounds, and the noise floor below which nothing is told apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median ratio with a confidence interval; `coverage` is the interval's exact confidence."""

    estimate: float
    low: float
    high: float
    coverage: float

    def judge(self, threshold: float) -> bool | None:
        """Whether the ratio reaches `threshold`: True or False if the whole interval says so, else None."""
        if self.low >= threshold:
            return True
        return False if self.high < threshold else None

    def widened(self, floor: float) -> Interval:
        """The interval with both ends moved outwards by a noise floor, which is in logarithmic units."""
        return Interval(self.estimate, self.low * math.exp(-floor), self.high * math.exp(floor), self.coverage)


def noise_floor(equal: Interval) -> float:
    """The largest difference, in logarithmic units, that two equal arms may have shown in an A/A run."""
    return max(abs(math.log(equal.low)), abs(math.log(equal.high)))


def order_statistic(samples: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """The largest k for which [k-th smallest, k-th largest] of `samples` values covers their median, and its coverage.

    The coverage is exact for any continuous distribution: 1 - 2 P(B < k) for B binomial(samples, 1/2). Raises
    ValueError where even the extremes don't reach `confidence`.
    """
    best = None
    below = 0.0
    for k in range(1, samples // 2 + 1):
        below += math.comb(samples, k - 1) / 2**samples
        if 1 - 2 * below < confidence:
            break
        best = (k, 1 - 2 * below)
    if best is None:
        raise ValueError(f"{samples} samples are too few for an interval of {confidence:.0%}")
    return best


def median_interval(logs: Sequence[float]) -> Interval:
    """Median of ratios, given as logarithms, with its order-statistic interval."""
    ordered = sorted(logs)
    k, coverage = order_statistic(len(ordered))
    return Interval(
        math.exp(statistics.median(ordered)), math.exp(ordered[k - 1]), math.exp(ordered[len(ordered) - k]), coverage
    )


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Median of the ratios of pairs, through their logarithms, with its order-statistic interval."""
    return median_interval([math.log(a / b) for a, b in zip(numerators, denominators, strict=True)])
