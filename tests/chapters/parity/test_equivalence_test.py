"""The quantiles against published tables, the power against published sample sizes, the rule against simulation."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest

from conformance.chapters.parity import equivalence_test
from conformance.chapters.parity.equivalence_test import compare, envelope, margin_of, pairs_needed, power, two_stages


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
    [
        *(
            (0.95, 1, 6.314),
            (0.975, 1, 12.706),
            (0.95, 7, 1.895),
            (0.975, 7, 2.365),
            (0.99, 7, 2.998),
            (0.999, 7, 4.785),
        ),
        *((0.95, 15, 1.753), (0.975, 15, 2.131), (0.995, 30, 2.750), (0.975, 100, 1.984), (0.999, 100, 3.174)),
    ],
)
def test_t_quantiles_are_the_published_ones(probability: float, freedom: int, value: float) -> None:
    assert equivalence_test.t_quantile(probability, freedom) == pytest.approx(value, abs=5e-4)
    assert equivalence_test.t_quantile(1 - probability, freedom) == pytest.approx(-value, abs=5e-4)
    assert equivalence_test.t_cdf(equivalence_test.t_quantile(probability, freedom), freedom) == pytest.approx(
        probability
    )


@pytest.mark.parametrize("x", [-30.0, -2.0, -0.1, 0.0, 0.3, 1.7, 25.0])
def test_t_of_one_and_two_degrees_is_known_in_closed_form(x: float) -> None:
    assert equivalence_test.t_cdf(x, 1) == pytest.approx(0.5 + math.atan(x) / math.pi, abs=1e-14)
    assert equivalence_test.t_cdf(x, 2) == pytest.approx(0.5 + x / (2 * math.sqrt(2 + x * x)), abs=1e-14)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4.
    [(0.95, 1, 3.841), (0.95, 7, 14.067), (0.95, 15, 24.996), (0.05, 10, 3.940), (0.99, 30, 50.892)],
)
def test_chi_square_quantiles_are_the_published_ones(probability: float, freedom: int, value: float) -> None:
    assert equivalence_test.chi2_quantile(probability, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(
    ("variation", "subjects", "published"),
    # Bioequivalence in a 2x2 cross-over, true ratio 0.95, limits 0.80 to 1.25: package PowerTOST, sampleN.TOST.
    [(0.20, 20, 0.834680), (0.25, 28, 0.807439), (0.30, 40, 0.815845)],
)
def test_power_is_the_published_one(variation: float, subjects: int, published: float) -> None:
    error = math.sqrt(math.log(1 + variation**2)) * math.sqrt(2 / subjects)

    assert power(math.log(1.25), error, subjects - 2, 0.05, math.log(0.95)) == pytest.approx(published, abs=1e-6)
    assert power(math.log(1.25), error, subjects - 2, 0.05, -math.log(0.95)) == pytest.approx(published, abs=1e-6)


def test_power_rises_with_pairs_to_what_is_asked_for() -> None:
    needed = pairs_needed(0.5, 1.0, 0.025)

    assert power(0.5, 1 / math.sqrt(needed), needed - 1, 0.025) >= equivalence_test.POWER
    assert power(0.5, 1 / math.sqrt(needed - 1), needed - 2, 0.025) < equivalence_test.POWER
    assert power(0.5, 0.0, 7, 0.025) == 1.0
    assert power(0.5, 0.0, 7, 0.025, shift=0.6) == 0.0
    assert pairs_needed(1.0, 0.0, 0.025) == 2
    assert pairs_needed(1e-9, 1.0, 0.025) == 2**14


def test_equal_arms_with_room_are_equivalent() -> None:
    found = compare([0.1, -0.1, 0.05, -0.05, 0.0, 0.1, -0.1, 0.0], 0.3, 0.025)

    assert found.outcome == "equivalent"
    assert found.nearest == 0.0
    assert found.farthest == pytest.approx(abs(found.mean) + 2.365 * found.spread / math.sqrt(8), abs=1e-4)


def test_an_interval_outside_the_margin_is_different_on_either_side() -> None:
    shifted = [0.9, 1.1, 1.0, 1.05, 0.95, 1.0, 1.0, 1.02]

    for sign in (1, -1):
        found = compare([sign * d for d in shifted], 0.5, 0.025)
        assert found.outcome == "different"
        assert found.nearest > found.margin


def test_an_interval_across_the_margin_is_undecided() -> None:
    found = compare([0.4, 0.6, 0.3, 0.7, 0.5, 0.5, 0.45, 0.55], 0.5, 0.025)

    assert found.outcome == "undecided"
    assert found.low < 0.5 < found.high


def test_a_wide_interval_is_undecided_and_says_what_would_do() -> None:
    found = compare([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], 0.5, 0.025)

    assert found.outcome == "undecided"
    assert found.needed > 30


def test_an_interval_within_the_margin_is_not_enough_where_the_power_is_low() -> None:
    """Whoever repeats that will hardly see it again."""
    found = compare([0.039, -0.039, 0.0], 0.1, 0.025)

    assert found.farthest < found.margin
    assert found.power < equivalence_test.POWER
    assert found.outcome == "undecided"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_run_that_is_not_finite_is_different(wrong: float) -> None:
    found = compare([0.0] * 7 + [wrong], 1.0, 0.025)

    assert found.outcome == "different"
    assert found.farthest == math.inf


@pytest.mark.parametrize(("differences", "margin"), [([0.0], 1.0), ([0.0, 0.0], 0.0), ([0.0, 0.0], math.nan)])
def test_what_decides_nothing_is_refused(differences: list[float], margin: float) -> None:
    with pytest.raises(ValueError, match="decide nothing"):
        compare(differences, margin, 0.025)


def test_the_second_look_is_taken_only_where_the_first_decides_nothing() -> None:
    asked: list[int] = []

    def differences(values: Sequence[float], count: int) -> Sequence[float]:
        asked.append(count)
        return values[:count]

    clear = [0.1, -0.1] * 8
    assert two_stages(lambda n: differences(clear, n), 1.0, first=8, last=16, alpha=0.05).pairs == 8
    assert asked == [8]
    late = [1.0, -1.0] * 4 + [0.0] * 8
    assert two_stages(lambda n: differences(late, n), 0.6, first=8, last=16, alpha=0.05).pairs == 16
    assert asked == [8, 8, 16]


def test_the_margin_is_three_standard_errors_with_its_lower_limit() -> None:
    seeds = [math.sin(number) for number in range(16)]

    # sqrt(15 / 24.996), the table's quantile of chi square with 15 degrees.
    assert margin_of(seeds, 8) == pytest.approx(3 * statistics.stdev(seeds) * math.sqrt(15 / 24.996 / 8), rel=1e-4)
    assert margin_of(seeds, 8, floor=5.0) == 5.0


def _judged(differences: list[float], margin: float) -> equivalence_test.Equivalence:
    return two_stages(lambda count: differences[:count], margin, first=8, last=16, alpha=0.05)


def _simulated(rng: random.Random, *, shift: float, scatter: float) -> equivalence_test.Equivalence:
    """The whole rule on normal figures: 16 fp32 seeds of standard deviation 1, paired differences by `scatter`."""
    margin = margin_of([rng.gauss(0, 1) for _ in range(16)], 8)
    return _judged([rng.gauss(shift, scatter) for _ in range(16)], margin)


@pytest.mark.parametrize("scatter", [0.1, 0.3])
def test_sound_runs_pass(scatter: float) -> None:
    """Differences of a tenth to a third of the seeds' scatter, as the paired runs here show."""
    rng = random.Random(1)
    outcomes = Counter(_simulated(rng, shift=0.0, scatter=scatter).outcome for _ in range(1000))

    assert outcomes["different"] == 0
    assert outcomes["equivalent"] >= 990


def test_sound_runs_that_share_nothing_are_never_failed() -> None:
    """Independent arms: differences scatter by sqrt(2), too much to pass often, but that is no failure."""
    rng = random.Random(2)
    outcomes = Counter(_simulated(rng, shift=0.0, scatter=math.sqrt(2)).outcome for _ in range(1000))

    assert outcomes["different"] <= 2
    assert outcomes["undecided"] >= 800


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_arms_a_margin_apart_pass_or_fail_in_one_run_of_twenty_at_most(shift: float) -> None:
    """The margin given, each outcome has probability 0.05 at most; 3 standard errors of 1000 simulations on top."""
    rng = random.Random(3)
    outcomes: Counter[str] = Counter()
    for _ in range(1000):
        differences = [rng.gauss(shift, 0.7) for _ in range(16)]
        outcomes[_judged(differences, 1.0).outcome] += 1

    allowed = 50 + 3 * math.sqrt(1000 * 0.05 * 0.95)
    assert outcomes["equivalent"] <= allowed
    assert outcomes["different"] <= allowed


def test_arms_twice_the_margin_apart_fail() -> None:
    rng = random.Random(4)
    outcomes = Counter(_simulated(rng, shift=2 * 3 / math.sqrt(8), scatter=0.3).outcome for _ in range(300))

    assert outcomes["equivalent"] == 0
    assert outcomes["different"] >= 290


def test_curves_of_sound_runs_stay_in_the_envelope() -> None:
    """Independent runs, ten correlated epochs: no more than alpha of them outside."""
    rng = random.Random(5)

    def curve() -> list[float]:
        common = rng.gauss(0, 1)
        return [common + rng.gauss(0, 0.5) - epoch for epoch in range(10)]

    outside = 0
    for _ in range(300):
        band = envelope([curve() for _ in range(16)], runs=8, of=1, alpha=0.05)
        outside += any(band.excess(curve()) > 1 for _ in range(8))

    assert outside <= 15 + 3 * math.sqrt(15)


def test_a_curve_outside_its_envelope_is_seen() -> None:
    rng = random.Random(6)
    curves = [[rng.gauss(0, 1), rng.gauss(-1, 1)] for _ in range(16)]
    band = envelope(curves, runs=8, of=1, alpha=0.001)

    assert band.excess([0.0, 8.0]) > 1
    assert band.excess([0.0, math.nan]) == math.inf
    assert envelope(curves, runs=1, of=8, alpha=0.001).high[0] < band.high[0]
