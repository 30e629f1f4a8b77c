"""The clocks and statistics of the speed chapter, proven on synthetic time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from conformance.measure.clocks import BrokenTiming, EventClock, HostClock, check_clock, device_clock, repeated
from conformance.measure.comparison import Plan, compare
from conformance.measure.intervals import median_ratio, order_statistic


class FakeDevice:
    """A device whose work takes the time it is told to, times `disturb(number of the work)`."""

    name = "fake"

    def __init__(self, disturb: Callable[[int], float] = lambda number: 1.0) -> None:
        self.now = 0.0
        self.number = count()
        self.disturb = disturb
        self.order = ""

    def work(self, seconds: float, name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.order += name
            self.now += seconds * self.disturb(next(self.number))

        return run

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


def _noise(kind: str, seed: int) -> Callable[[int], float]:
    """Relative disturbances: 2 % of scatter, and a drift, two modes, outliers or heavy tails on top."""
    rng = random.Random(seed)
    modes: Iterator[float] = (factor for factor in iter(lambda: rng.choice((1.0, 1.3)), None))

    def disturb(number: int) -> float:
        base = math.exp(rng.gauss(0, 0.02))
        extra = {
            "plain": lambda: 1.0,
            "drift": lambda: 1 + 0.05 * number / 60,
            "bimodal": lambda: next(modes),
            "outliers": lambda: 5.0 if rng.random() < 0.1 else 1.0,
            "heavy": lambda: 1 + 0.01 * abs(rng.gauss(0, 1) / (abs(rng.gauss(0, 1)) + 0.05)),
        }[kind]
        return base * extra()

    return disturb


KINDS = ("plain", "drift", "bimodal", "outliers", "heavy")


@pytest.mark.parametrize(
    ("samples", "k", "coverage"), [(6, 1, 0.96875), (20, 6, 0.9586), (30, 10, 0.9572), (50, 18, 0.9672)]
)
def test_order_statistics_match_the_tables(samples: int, k: int, coverage: float) -> None:
    seen_k, seen_coverage = order_statistic(samples)
    assert seen_k == k
    assert seen_coverage == pytest.approx(coverage, abs=1e-4)


def test_too_few_samples_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 samples are too few"):
        order_statistic(5)


def test_median_ratio_of_known_numbers() -> None:
    seen = median_ratio([2.0] * 5 + [4.0], [1.0] * 6)
    assert (seen.low, seen.estimate, seen.high) == pytest.approx((2.0, 2.0, 4.0))


@pytest.mark.parametrize(("threshold", "verdict"), [(1.9, True), (2.0, True), (3.0, None), (4.0, None), (4.1, False)])
def test_an_interval_decides_or_does_not(threshold: float, verdict: bool | None) -> None:
    assert median_ratio([2.0] * 5 + [4.0], [1.0] * 6).judge(threshold - 1e-9) is verdict


def test_arms_alternate() -> None:
    device = FakeDevice()
    compare(device, device.work(1, "A"), device.work(1, "B"), Plan(6, 6, width=1))
    assert device.order[4:].replace("BAAB", "ABBA") == "ABBA" * 3


def test_a_budget_stops_after_six_pairs() -> None:
    device = FakeDevice()
    seen = compare(device, device.work(1), device.work(1), Plan(30, 30, width=0, budget=8.0), now=lambda: device.now)
    assert len(seen.baseline) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_equal_arms_raise_few_alarms(kind: str) -> None:
    alarms = 0
    for seed in range(300):
        device = FakeDevice(_noise(kind, seed))
        speedup = compare(device, device.work(1.0), device.work(1.0), Plan(60, 60, width=0)).speedup
        alarms += speedup.judge(0.98) is False
    assert alarms <= 3


@pytest.mark.parametrize("kind", ["plain", "drift", "outliers", "heavy"])
def test_a_tenth_slower_is_found(kind: str) -> None:
    found = 0
    for seed in range(300):
        device = FakeDevice(_noise(kind, seed))
        found += compare(device, device.work(1.0), device.work(1.1), Plan(60, 60, width=0)).speedup.judge(0.98) is False
    assert found >= 297


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_covers_the_true_ratio(kind: str) -> None:
    covered = 0
    for seed in range(400):
        device = FakeDevice(_noise(kind, seed))
        speedup = compare(device, device.work(1.5), device.work(1.0), Plan(60, 60, width=0)).speedup
        covered += speedup.low <= 1.5 <= speedup.high
    # 95 % of 400, less three standard deviations of that count.
    assert covered >= 380 - 3 * math.sqrt(400 * 0.95 * 0.05)


def test_drift_would_fool_arms_in_blocks() -> None:
    device = FakeDevice(_noise("drift", 0))
    blocks = [[device.seconds(device.work(1.0)) for _ in range(30)] for _ in range(2)]
    assert median_ratio(*blocks).judge(0.99) is False


def test_a_clock_that_waits_passes() -> None:
    device = FakeDevice()
    assert check_clock(device, device.work(1.0)) == pytest.approx(4.0)


def test_a_clock_that_sees_only_the_launch_is_broken() -> None:
    times = iter(number * 1e-6 for number in count())
    clock = HostClock(synchronize=lambda: None, now=lambda: next(times))
    with pytest.raises(BrokenTiming, match="does not wait"):
        check_clock(clock, lambda: None)


def test_a_clock_that_stands_still_is_broken() -> None:
    with pytest.raises(BrokenTiming, match="does not wait"):
        check_clock(HostClock(lambda: None, now=lambda: 1.0), lambda: None)


def test_the_host_clock_waits_before_and_after() -> None:
    log: list[str] = []
    times = iter((1.0, 3.5))

    def now() -> float:
        log.append("now")
        return next(times)

    clock = HostClock(lambda: log.append("wait"), now)
    assert clock.seconds(lambda: log.append("work")) == 2.5
    assert log == ["wait", "now", "work", "wait", "now"]


class FakeEvents:
    """A device module with events, on a timeline in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        module = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = module.now
                module.log.append("record")

            def elapsed_time(self, end: Event) -> float:
                module.log.append("read")
                return end.at - self.at

        self.Event = Event

    def synchronize(self) -> None:
        self.log.append("wait")


def test_the_event_clock_reads_seconds_after_waiting() -> None:
    module = FakeEvents()

    def work() -> None:
        module.now += 250.0

    assert EventClock(module).seconds(work) == 0.25
    assert module.log == ["wait", "record", "record", "wait", "read"]


def test_each_device_gets_its_clock() -> None:
    assert device_clock("cpu", None).name.startswith("host")
    assert device_clock("mps", None).name.startswith("host")
    assert isinstance(device_clock("cuda", None), EventClock)


def test_repeated_repeats() -> None:
    device = FakeDevice()
    repeated(device.work(1, "x"), 3)()
    assert device.order == "xxx"
