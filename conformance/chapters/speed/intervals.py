"""Confidence intervals for a median ratio, and the noise floor below which no difference is detected."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99  # two equal arms seem different in one measurement of a hundred at most


@dataclass(frozen=True)
class Interval:
    """A median ratio with a confidence interval that covers the true one with a probability of at least `coverage`."""

    estimate: float
    low: float
    high: float
    coverage: float

    def judge(self, threshold: float) -> bool | None:
        """Return whether the ratio reaches `threshold`: True or False if the whole interval says so, else None."""
        if self.low >= threshold:
            return True
        return False if self.high < threshold else None

    def widened(self, floor: float) -> Interval:
        """Return the interval with both ends moved outwards by a noise floor, which is in logarithmic units."""
        return Interval(self.estimate, self.low * math.exp(-floor), self.high * math.exp(floor), self.coverage)

    @property
    def width(self) -> float:
        """High end over low end, in logarithmic units; infinite where there were too few samples for two ends."""
        return math.log(self.high) - math.log(self.low) if self.low > 0 else math.inf


def noise_floor(equal: Interval) -> float:
    """Return the largest difference, in logarithmic units, that two equal arms may have shown in an A/A run.

    It is the end of their interval that lies further from 1: what the machine scatters and what it is biased by both
    count. Infinite where the A/A run took too few samples.
    """
    return max(-math.log(equal.low), math.log(equal.high), 0.0) if equal.low > 0 else math.inf


@functools.cache
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
        raise ValueError(f"{samples} samples are too few for an interval of {confidence:.1%}")
    return best


def median_ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Return median of the ratios of pairs, through their logarithms, with its order-statistic interval.

    Too few pairs for `confidence` exclude nothing: the interval is [0, inf]; without any the estimate is NaN.
    """
    logs = sorted(math.log(a / b) for a, b in zip(numerators, denominators, strict=True))
    estimate = math.exp(statistics.median(logs)) if logs else math.nan
    try:
        k, coverage = order_statistic(len(logs), confidence)
    except ValueError:
        return Interval(estimate, 0.0, math.inf, 1.0)
    return Interval(estimate, math.exp(logs[k - 1]), math.exp(logs[len(logs) - k]), coverage)
