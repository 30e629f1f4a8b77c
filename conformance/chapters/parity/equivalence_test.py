"""Two one-sided t-tests (TOST) for the equivalence of two arms of paired runs, with their power."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["equivalent", "different", "undecided"]

POWER = 0.8  # Cohen (1988); Lakens (2017) plans equivalence tests for it
_MOST_PAIRS = 2**14


@dataclass(frozen=True)
class Equivalence:
    """Result of a test of paired differences against a margin for their mean.

    `low` and `high` end the confidence interval of the mean of level 1 - 2 alpha; `power` is the probability of
    "equivalent" for two arms of equal mean whose differences have the measured variance.
    """

    pairs: int
    mean: float
    spread: float
    low: float
    high: float
    margin: float
    alpha: float
    power: float
    outcome: Outcome

    @property
    def needed(self) -> int:
        """The pairs that have a power of POWER; 2 where a run was not finite, as no number of pairs cures that."""
        return 2 if math.isnan(self.spread) else pairs_needed(self.margin, self.spread, self.alpha)

    @property
    def nearest(self) -> float:
        """The value of the interval that is nearest to no difference, by size."""
        return 0.0 if self.low <= 0.0 <= self.high else min(abs(self.low), abs(self.high))

    @property
    def farthest(self) -> float:
        """The value of the interval that is farthest from no difference, by size; inf where a run was not finite."""
        return max(abs(self.low), abs(self.high))


def compare(differences: Sequence[float], margin: float, alpha: float) -> Equivalence:
    """Run two one-sided t-tests of level `alpha` on paired differences.

    Source: Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987.

    Equivalent: both tests reject, so that the interval of level 1 - 2 alpha lies within (-margin, margin) (Lakens,
    Soc. Psychol. Personal. Sci. 8, 2017), and the power is POWER at least. Different: that interval lies outside, all
    of it on one side. Else undecided: more pairs are needed. Differences that are not finite are different. Raises
    ValueError for fewer than two pairs or a margin that is not positive.
    """
    pairs = len(differences)
    if pairs < 2 or not 0 < margin < math.inf:
        raise ValueError(f"{pairs} pairs and a margin of {margin} decide nothing")
    if not all(map(math.isfinite, differences)):
        return Equivalence(pairs, math.nan, math.nan, math.inf, math.inf, margin, alpha, 0.0, "different")
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    reach = t_quantile(1 - alpha, pairs - 1) * spread / math.sqrt(pairs)
    low, high = mean - reach, mean + reach
    reached = power(margin, spread / math.sqrt(pairs), pairs - 1, alpha)
    outcome: Outcome = "undecided"
    if low > margin or high < -margin:
        outcome = "different"
    elif -margin < low and high < margin and reached >= POWER:
        outcome = "equivalent"
    return Equivalence(pairs, mean, spread, low, high, margin, alpha, reached, outcome)


def two_stages(
    differences: Callable[[int], Sequence[float]], margin: float, *, first: int, last: int, alpha: float
) -> Equivalence:
    """`compare` with `first` pairs and, only if that decides nothing, once more with `last`; `differences(n)` gives n.

    Each look spends alpha / 2, so that by Bonferroni's inequality the probability that either of them says
    "equivalent" of arms a margin apart, or "different" of arms within it, is at most `alpha`, whatever the dependence
    of the two looks. There is no third.
    """
    seen = compare(differences(first), margin, alpha / 2)
    return compare(differences(last), margin, alpha / 2) if seen.outcome == "undecided" else seen


def margin_of(seeds: Sequence[float], pairs: int, *, floor: float = 0.0) -> float:
    """Return the margin: three standard errors of a mean of `pairs` runs, by the variance of `seeds`.

    A shift within it is one that a mean of so many runs with other seeds makes as well (Shewhart's limits). The
    variance is that of one figure over fp32 runs, more of them than pairs, as MLPerf's reference convergence points are
    made of twice the runs that are judged; its lower confidence limit of level 95 % is taken, so that chance widens
    the margin in one run of twenty at most. Not below `floor`, the resolution of the figure.
    """
    freedom = len(seeds) - 1
    spread = statistics.stdev(seeds) * math.sqrt(freedom / chi2_quantile(0.95, freedom))
    return max(floor, 3 * spread / math.sqrt(pairs))


def power(margin: float, error: float, freedom: int, alpha: float, shift: float = 0.0) -> float:
    """Return the probability that both one-sided tests reject, for a true mean `shift` with standard error `error`.

    With m the mean seen and e its estimated standard error, both reject iff |m| < margin - t e. Given e, m is normal;
    freedom (e / error)^2 is chi square with `freedom` degrees, independent of m. The integral over e (Owen's Q,
    Biometrika 52, 1965, in another form) is taken by Simpson's rule.
    """
    if error == 0.0:
        return float(abs(shift) < margin)
    t = t_quantile(1 - alpha, freedom)

    def both_reject(ratio: float) -> float:
        """Return the power given e / error, times the density of that ratio."""
        room = margin - t * error * ratio
        if room <= 0:
            return 0.0
        given = normal_cdf((room - shift) / error) - normal_cdf((-room - shift) / error)
        return given * _chi_density(ratio, freedom)

    # The ratio's standard deviation is about 1/sqrt(2 freedom); nothing to speak of lies ten of them away.
    far = 10 / math.sqrt(2 * freedom)
    low, high = max(0.0, 1 - far), min(1 + far, margin / (t * error))
    if high <= low:
        return 0.0
    return min(1.0, _simpson(both_reject, low, high))


def pairs_needed(margin: float, spread: float, alpha: float) -> int:
    """Return the fewest pairs whose power is POWER where the arms are equal; 16,384 stands for that or more."""

    def enough(pairs: int) -> bool:
        return power(margin, spread / math.sqrt(pairs), pairs - 1, alpha) >= POWER

    high = 2
    while high < _MOST_PAIRS and not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Envelope:
    """For each epoch the lowest and the highest value that a curve may have."""

    low: list[float]
    high: list[float]

    def excess(self, curve: Sequence[float]) -> float:
        """How far the curve goes from the middle at most, in half widths: within the envelope up to 1; NaN is inf."""
        ratios = [
            abs(value - (low + high) / 2) / ((high - low) / 2)
            for value, low, high in zip(curve, self.low, self.high, strict=True)
        ]
        return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def envelope(curves: Sequence[Sequence[float]], *, runs: int, of: int, alpha: float) -> Envelope:
    """Where `runs` curves, each the mean of `of` runs like those of `curves`, stay with probability 1 - alpha at least.

    Per epoch the prediction interval mean +- t s sqrt(1/of + 1/n) of normal values, t at alpha / (2 epochs runs): by
    Bonferroni's inequality it holds for all epochs and runs at once. Runs that share seeds with `curves` vary less
    about their mean than the independent ones that it is made for.
    """
    count, epochs = len(curves), len(curves[0])
    reach = t_quantile(1 - alpha / (2 * epochs * runs), count - 1) * math.sqrt(1 / of + 1 / count)
    bands = [(statistics.fmean(epoch), reach * statistics.stdev(epoch)) for epoch in zip(*curves, strict=True)]
    return Envelope([mean - half for mean, half in bands], [mean + half for mean, half in bands])


def normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def t_cdf(x: float, freedom: float) -> float:
    """Return the distribution function of Student's t (Abramowitz and Stegun, 26.5.27 and 26.7.1)."""
    tail = _beta(freedom / 2, 0.5, freedom / (freedom + x * x)) / 2
    return 1 - tail if x > 0 else tail


@functools.cache
def t_quantile(probability: float, freedom: float) -> float:
    """Return the x with t_cdf(x) = probability, for a probability between 0 and 1."""
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    return _inverse(lambda x: t_cdf(x, freedom), probability)


def chi2_cdf(x: float, freedom: float) -> float:
    """Return the distribution function of chi square, by the series of the incomplete gamma function (A&S 6.5.29)."""
    half, argument = freedom / 2, x / 2
    if argument <= 0:
        return 0.0
    term = total = 1 / half
    for k in range(1, 10_000):
        term *= argument / (half + k)
        total += term
        if term < total * 1e-16:
            break
    return total * math.exp(half * math.log(argument) - argument - math.lgamma(half))


@functools.cache
def chi2_quantile(probability: float, freedom: float) -> float:
    """Return the x with chi2_cdf(x) = probability, for a probability between 0 and 1."""
    return _inverse(lambda x: chi2_cdf(x, freedom), probability)


def _inverse(function: Callable[[float], float], value: float) -> float:
    """Return where an increasing function of x >= 0 takes `value`, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while function(high) < value:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (A&S 26.5.8) evaluated by Lentz's method."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    # Lentz: the fraction 1/(1 + t1/(1 + t2/(1 + ...))) from the front.
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for k in range(1, 1000):
        for term in (
            k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)),
            -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * fraction


def _chi_density(ratio: float, freedom: int) -> float:
    """Return the density of sqrt(chi square / freedom)."""
    if ratio <= 0:
        return 0.0
    half = freedom / 2
    log = math.log(2) + half * math.log(half) + (freedom - 1) * math.log(ratio) - half * ratio * ratio
    return math.exp(log - math.lgamma(half))


def _simpson(function: Callable[[float], float], low: float, high: float, intervals: int = 256) -> float:
    """Return the integral from `low` to `high` by Simpson's rule."""
    step = (high - low) / intervals
    inner = sum((4 if k % 2 else 2) * function(low + k * step) for k in range(1, intervals))
    return step / 3 * (function(low) + inner + function(high))
