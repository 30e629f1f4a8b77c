"""Comparisons of two arms: which runs are taken, when they end, and what their intervals may claim."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.chapters.speed.clocks import BrokenTiming
from conformance.chapters.speed.intervals import CONFIDENCE, Interval, median_ratio, order_statistic
from conformance.chapters.speed.paired_comparison import PLANS, Comparison, Plan, Progress, compare, drifted, warm_up
from tests.simulation.clocks import Cached, Machine, scatter

PLAN = Plan(pilot=10, most=40, width=0.0, warm_ups=1)  # a width that is never reached


def test_each_pair_has_both_arms_in_an_order_that_is_drawn() -> None:
    machine = Machine()
    compare(machine, machine.work(1, "A"), machine.work(1, "B"), replace(PLAN, width=0.0, pilot=40))
    pairs = [machine.order[i : i + 2] for i in range(2, len(machine.order), 2)]
    assert machine.order[:2] == "AB"  # warming up
    assert set(pairs) == {"AB", "BA"}
    assert 12 <= pairs.count("AB") <= 28
    assert pairs != ["AB", "BA"] * 20


def test_the_seed_draws_the_order() -> None:
    orders = []
    for seed in (1, 1, 2):
        machine = Machine(scatter(random.Random(0)))
        compare(machine, machine.work(1, "A"), machine.work(1, "B"), PLAN, seed=seed)
        orders.append(machine.order)
    assert orders[0] == orders[1] != orders[2]


def test_seconds_stay_with_their_arm() -> None:
    machine = Machine()
    seen = compare(machine, machine.work(3.0), machine.work(2.0), PLAN)
    assert (set(map(round, seen.baseline)), set(map(round, seen.candidate))) == ({3}, {2})
    assert (len(seen.baseline), seen.stopped) == (10, "width")
    assert seen.speedup.estimate == pytest.approx(1.5)


def test_a_wide_interval_asks_for_more_up_to_the_most() -> None:
    counts = []
    for sigma in (0.001, 0.02, 0.2):
        machine = Machine(scatter(random.Random(1), sigma))
        seen = compare(machine, machine.work(1.0), machine.work(1.0), replace(PLAN, width=0.06))
        counts.append((len(seen.baseline), seen.stopped))
    assert counts == [(10, "width"), (20, "width"), (40, "most")]


def test_a_budget_is_kept() -> None:
    machine = Machine(scatter(random.Random(2)))
    plan = replace(PLAN, budget=50.0)
    seen = compare(machine, machine.work(1.0), machine.work(1.0), plan, now=lambda: machine.now)
    assert seen.stopped == "budget"
    assert 20 <= len(seen.baseline) < 25
    assert machine.now <= 50 * 1.05


def test_a_budget_too_small_for_an_interval_decides_nothing() -> None:
    machine = Machine()
    seen = compare(machine, machine.work(1), machine.work(2), replace(PLAN, budget=12), now=lambda: machine.now)
    assert (len(seen.baseline), seen.stopped) == (3, "budget")
    assert seen.speedup.estimate == pytest.approx(0.5)
    assert seen.speedup.judge(1.0) is None


def test_nothing_at_all_within_the_budget() -> None:
    machine = Machine()
    seen = compare(machine, machine.work(1), machine.work(2), replace(PLAN, budget=1), now=lambda: machine.now)
    assert (seen.baseline, seen.stopped) == ((), "budget")
    assert seen.speedup.judge(1.0) is None


@pytest.mark.parametrize(
    ("pairs", "looks"),
    [(1000.0, (10, 20, 40)), (40.5, (10, 20, 40)), (39.9, (10, 20, 39)), (20, (10, 20)), (19.9, (19,)), (8, (8,))],
)
def test_a_budget_for_fewer_pairs_divides_the_error_among_fewer_looks(pairs: float, looks: tuple[int, ...]) -> None:
    assert PLAN.within(pairs).looks == looks
    assert PLAN.within(pairs).confidence == pytest.approx(1 - (1 - CONFIDENCE) / len(looks))


def test_a_budget_for_eight_pairs_gives_an_interval() -> None:
    machine = Machine(scatter(random.Random(2)))
    plan = replace(PLANS["full"], warm_ups=1, budget=20.0)
    seen = compare(machine, machine.work(1.0), machine.work(1.0), plan, now=lambda: machine.now)
    assert (len(seen.baseline), seen.stopped, seen.confidence) == (8, "budget", CONFIDENCE)
    assert 0 < seen.speedup.low <= 1 <= seen.speedup.high < math.inf


@pytest.mark.parametrize("told", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_tells_no_time_is_broken(told: float) -> None:
    class Clock:
        name = "odd"

        def seconds(self, work: Callable[[], object]) -> float:
            return told

    with pytest.raises(BrokenTiming, match="odd tells"):
        compare(Clock(), lambda: None, lambda: None, PLAN)


def test_a_plan_without_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="6 samples are too few"):
        Plan(pilot=6, most=6, width=0.1)


@pytest.mark.parametrize("level", PLANS)
def test_every_look_of_the_plans_has_an_interval(level: str) -> None:
    plan = PLANS[level]
    assert plan.looks[0] == plan.pilot
    assert plan.looks[-1] == plan.most
    errors = [1 - order_statistic(pairs, plan.confidence)[1] for pairs in plan.looks]
    assert sum(errors) <= 1 - CONFIDENCE


def test_what_the_clock_cannot_resolve_widens_the_interval() -> None:
    machine = Machine()
    machine.resolution = 0.001  # type: ignore[attr-defined]
    speedup = compare(machine, machine.work(1.0), machine.work(0.5), PLAN).speedup
    assert (speedup.low, speedup.high) == pytest.approx((2 / 1.001 / 1.002, 2 * 1.001 * 1.002))


def test_runs_that_the_clock_hardly_tells_are_repeated() -> None:
    class Coarse(Machine):
        resolution = 0.5

        def seconds(self, work: Callable[[], object]) -> float:
            return round(super().seconds(work) / 0.5) * 0.5

    machine = Coarse()
    seen = compare(machine, machine.work(0.8, "A"), machine.work(0.4, "B"), PLAN)
    assert seen.calls == 100  # of one step of the clock, which is what it told of the shorter arm
    assert (seen.baseline[0], seen.candidate[0]) == pytest.approx((0.8, 0.4), rel=0.02)
    assert seen.speedup.estimate == pytest.approx(2.0, rel=0.05)
    assert 1.9 < seen.speedup.low <= 2 <= seen.speedup.high < 2.1
    assert {len(run) % 100 for run in machine.order[2:].replace("AB", "A B").replace("BA", "B A").split()} == {0}


def test_a_clock_of_some_resolution_that_stands_still_is_broken() -> None:
    machine = Machine()
    machine.resolution = 0.5  # type: ignore[attr-defined]
    with pytest.raises(BrokenTiming, match=r"simulated tells 0.0 s"):
        compare(machine, lambda: None, lambda: None, PLAN)


def test_one_look_has_an_exact_coverage_and_several_have_a_bound() -> None:
    machine = Machine()
    arms = machine.work(1.0), machine.work(1.0)
    assert compare(machine, *arms, PLAN).speedup.coverage == CONFIDENCE
    assert compare(machine, *arms, replace(PLAN, pilot=40)).speedup.coverage == order_statistic(40)[1]


def test_progress_is_told_often_and_costs_little() -> None:
    order_statistic.cache_clear()
    machine, told = Machine(scatter(random.Random(3))), list[Progress]()
    plan = replace(PLAN, width=0.05, budget=1000.0)
    compare(machine, machine.work(1.0), machine.work(1.0), plan, progress=told.append, now=lambda: machine.now)
    assert [each.done for each in told] == [*range(1, 11), *range(20, told[-1].done + 1, 10)]
    assert order_statistic.cache_info().misses <= len(told) + len(plan.looks)
    assert all(each.done <= each.planned <= 40 and 0 <= each.seconds_left <= 80 for each in told)
    assert told[0].interval is None
    assert told[-1].interval is not None
    assert told[-1].planned == told[-1].done


def test_no_more_time_is_left_than_the_budget_has() -> None:
    slowing = itertools.chain(itertools.repeat(1.0, 20), itertools.repeat(5.0))
    machine, told = Machine(slowing), list[tuple[Progress, float]]()
    compare(
        machine,
        machine.work(1.0),
        machine.work(1.0),
        replace(PLAN, budget=100.0, width=0.0, pilot=40),
        progress=lambda each: told.append((each, 100.0 - machine.now)),
        now=lambda: machine.now,
    )
    assert told[0][0].planned == 40
    assert all(each.seconds_left <= left for each, left in told)


def test_the_garbage_collector_rests_meanwhile() -> None:
    machine, seen = Machine(), set[bool]()

    def work() -> None:
        machine.work(1.0)()
        seen.add(gc.isenabled())

    assert gc.isenabled()
    compare(machine, work, work, PLAN)
    assert gc.isenabled()
    assert seen == {False}


def test_before_runs_untimed_in_front_of_every_timed_run() -> None:
    machine = Machine()
    before = machine.work(7.0, "-")
    seen = compare(machine, machine.work(1, "A"), machine.work(1, "B"), PLAN, before=before)
    assert set(machine.order[2::2]) == {"-"}
    assert max(seen.baseline) == pytest.approx(1.0)


@pytest.mark.parametrize(("flushed", "fooled"), [(True, False), (False, True)])
def test_an_arm_with_warm_caches_fools_nobody_who_flushes(flushed: bool, fooled: bool) -> None:
    machine = Cached(scatter(random.Random(4)))
    baseline, candidate = machine.work(1.0), machine.cached(1.0, "kept")
    seen = compare(machine, baseline, candidate, PLANS["standard"], before=machine.flush if flushed else None)
    assert (seen.speedup.low > 1.2) is fooled
    assert (seen.speedup.low <= 1 <= seen.speedup.high) is not fooled


def test_warming_up_ends_when_runs_no_longer_get_faster() -> None:
    falling = itertools.chain((100.0, 10.0, 5.0, 2.0), itertools.repeat(1.0))
    machine = Machine(falling)
    assert warm_up(machine, machine.work(1.0, "x"), most=50) == pytest.approx(1.0)
    assert machine.order == "x" * 7
    stuck = Machine(1000.0 * 0.9**number for number in itertools.count())
    warm_up(stuck, stuck.work(1.0, "x"), most=20)
    assert stuck.order == "x" * 20


def test_warming_up_leaves_half_of_the_budget() -> None:
    machine = Machine(0.93**number for number in itertools.count())
    plan = replace(PLANS["standard"], budget=10.0, width=0.5)
    seen = compare(machine, machine.work(1.0, "A"), machine.work(1.0, "B"), plan, now=lambda: machine.now)
    assert machine.order.startswith("A" * 6 + "B")  # the first arm spent half, so the second has one run
    assert machine.now <= 10.0
    assert seen.stopped == "budget"


def test_a_slow_run_does_not_prolong_warming_up() -> None:
    machine = Machine(itertools.chain((1.0, 9.0), itertools.repeat(1.0)))
    warm_up(machine, machine.work(1.0, "x"), most=50)
    assert machine.order == "xxx"


_FIXED_NOISE = {
    "rhythm": [0.03, -0.03, -0.03, 0.03] * 5,
    "drift": [0.01 * i for i in range(20)],
    "outliers": [0.001 * (i * 7 % 23) + 1.6 * (i % 7 == 3) for i in range(20)],
    "two clocks": [0.001 * (i * 7 % 23) + 0.26 * (i in (1, 2, 3, 8, 11, 12, 17)) for i in range(20)],
}


@pytest.mark.parametrize("kind", _FIXED_NOISE)
def test_over_all_orders_the_coverage_is_that_of_the_binomial(kind: str) -> None:
    """No assumption about noise: it is given, and the coin alone makes the interval cover the true ratio."""
    noise, true = _FIXED_NOISE[kind], math.log(1.5)
    differences = [noise[i] - noise[i + 1] for i in range(0, 20, 2)]
    k, coverage = order_statistic(10, 0.95)
    covered = 0
    for signs in itertools.product((1, -1), repeat=10):
        logs = sorted(true + sign * difference for sign, difference in zip(signs, differences, strict=True))
        covered += logs[k - 1] <= true + 1e-12 and logs[10 - k] >= true - 1e-12
    assert covered / 2**10 == pytest.approx(coverage)


def test_a_fixed_order_can_miss_for_certain() -> None:
    noise = _FIXED_NOISE["rhythm"]
    first = [math.exp(noise[i]) for i in range(20) if i % 4 in (0, 3)]
    second = [math.exp(noise[i]) for i in range(20) if i % 4 in (1, 2)]
    seen = median_ratio(first, second)  # ABBA throughout, of equal arms
    assert seen.low > 1.05


@pytest.mark.parametrize("stop", ["narrow", "told apart"])
def test_over_all_orders_no_rule_of_stopping_spoils_the_coverage(stop: str) -> None:
    """Even one that stops as soon as equal arms seem to differ, at any look."""
    plan = Plan(pilot=10, most=14, width=0.0)
    noise = random.Random(5)
    sizes = [abs(noise.gauss(0, 0.05)) for _ in range(plan.most)]
    missed = 0
    for signs in itertools.product((1, -1), repeat=plan.most):
        ratios = [math.exp(sign * size) for sign, size in zip(signs, sizes, strict=True)]
        for look in plan.looks:
            seen = Comparison(tuple(ratios[:look]), (1.0,) * look, "", plan.confidence).speedup
            misses = not seen.low <= 1 <= seen.high
            if misses if stop == "told apart" else seen.width < 0.15:
                break
        missed += misses
    assert missed / 2**plan.most <= 1 - CONFIDENCE


def _ratios(logs: list[float]) -> Comparison:
    return Comparison(tuple(math.exp(log) for log in logs), (1.0,) * len(logs))


def test_a_ratio_that_changes_is_told() -> None:
    """Fifty runs until one arm is warm; one that slows down by 3 % in the middle."""
    noise = random.Random(3)
    warming = [0.5 * (number < 50) + noise.gauss(0, 0.05) for number in range(100)]
    slowing = [0.03 * (number > 80) + noise.gauss(0, 0.02) for number in range(160)]

    assert "went from 1.6" in str(drifted(_ratios(warming)))
    assert drifted(_ratios(slowing)) is not None
    assert drifted(_ratios(warming[40:59])) is None  # too few to tell
    assert drifted(_ratios(warming), Interval(1.3, 0.9, 2.0, 0.99)) is None  # both halves are in what is judged by
    assert drifted(_ratios(warming), Interval(1.3, 1.25, 1.35, 0.99)) is not None


def test_a_ratio_that_stays_is_not_called_drifting() -> None:
    noise = random.Random(4)
    told = sum(
        drifted(_ratios([noise.gauss(0, 0.05) for _ in range(size)])) is not None
        for size in (20, 40, 160)
        for _ in range(400)
    )
    assert told <= 4  # of 1200, at one in a thousand
