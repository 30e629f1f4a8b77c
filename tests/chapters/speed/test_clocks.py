"""The clocks of the speed chapter, on devices that are made up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from conformance.chapters.speed.clocks import (
    BrokenTiming,
    EventClock,
    HostClock,
    ProcessorClock,
    Work,
    check_clock,
    device_clock,
    repeated,
    step_clock,
)
from tests.simulation.clocks import Asynchronous, Machine


def test_the_host_clock_waits_before_and_after() -> None:
    log: list[str] = []
    times = iter((1.0, 3.5))

    def now() -> float:
        log.append("now")
        return next(times)

    clock = HostClock(lambda: log.append("wait"), now)
    assert clock.seconds(lambda: log.append("work")) == 2.5
    assert log == ["wait", "now", "work", "wait", "now"]


class Card(Asynchronous):
    """A device module like torch.cuda: events and a delay on a device that runs behind the host."""

    def __init__(self, cycle: float | None = 1e-9, launch: float = 1e-5) -> None:
        super().__init__(launch)
        self.delays: list[float] = []
        card = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                card.queue(0.0)
                self.at = card.device

            def query(self) -> bool:
                return card.host >= self.at

            def elapsed_time(self, end: Event) -> float:
                assert card.host >= end.at, "read before the device was there"
                return (end.at - self.at) * 1e3

        self.Event = Event
        if cycle is not None:
            self._sleep = self._spin
        self._cycle = cycle

    def _spin(self, cycles: int) -> None:
        assert self._cycle is not None
        self.delays.append(cycles * self._cycle)
        self.queue(self.delays[-1])

    def kernels(self, number: int, seconds: float) -> Work:
        return repeated(lambda: self.queue(seconds), number)


def test_without_a_delay_launches_count_as_device_time() -> None:
    card = Card(cycle=None)
    clock = EventClock(card, card.now)
    assert clock.seconds(card.kernels(100, 1e-6)) == pytest.approx(1e-3, rel=0.05)
    assert not clock.hidden
    assert (clock.runs, clock.exposed) == (1, 1)


def test_behind_a_delay_only_the_device_counts() -> None:
    card = Card()
    clock = EventClock(card, card.now)
    work = card.kernels(100, 1e-6)
    seen = [clock.seconds(work) for _ in range(4)]
    assert clock.hidden
    assert seen[-1] == pytest.approx(1e-4, rel=0.05)
    assert max(card.delays) < 0.01
    exposed = clock.exposed
    assert clock.runs == 4 > exposed
    clock.seconds(work)
    assert (clock.runs, clock.exposed) == (5, exposed)


@pytest.mark.parametrize("cycle", [1e-10, 1e-8, 1e-7])
def test_the_delay_finds_its_length_whatever_a_cycle_takes(cycle: float) -> None:
    card = Card(cycle)
    clock = EventClock(card, card.now)
    for _ in range(8):
        seen = clock.seconds(card.kernels(50, 2e-6))
    assert clock.hidden
    assert seen == pytest.approx(1e-4, rel=0.05)


def test_work_that_waits_for_the_device_ends_the_delays() -> None:
    card = Card()
    clock = EventClock(card, card.now)

    def work() -> None:
        card.queue(1e-3)
        card.synchronize()
        card.queue(1e-3)

    assert clock.name == "device events, launches hidden"
    seen = [clock.seconds(work) for _ in range(24)]
    assert clock.name == "device events"
    assert not clock.hidden
    assert seen[-1] == pytest.approx(2e-3, rel=0.05)
    assert len(card.delays) < 24
    assert max(card.delays) < 0.1


def test_libraries_that_first_runs_load_do_not_end_the_delays() -> None:
    card = Card()
    clock, first = EventClock(card, card.now), [0.5, 0.3, 0.2, 0.1]

    def work() -> None:
        card.host += first.pop() if first else 0.0
        card.queue(1e-6)

    for _ in range(8):
        clock.seconds(work)
    assert clock.hidden
    assert max(card.delays) < 0.01


def test_an_accident_of_the_host_does_not_lengthen_the_delay() -> None:
    card = Card()
    clock = EventClock(card, card.now)

    def work(stall: float = 0.0) -> None:
        card.queue(1e-6)
        card.host += stall

    for number in range(60):
        clock.seconds(lambda: work(5e-3)) if number % 10 == 3 else clock.seconds(work)
    assert clock.hidden
    assert len(set(card.delays)) == 1


def test_an_arm_with_more_launches_lengthens_the_delay_of_both() -> None:
    card = Card()
    clock = EventClock(card, card.now)
    few, many = card.kernels(2, 1e-6), card.kernels(200, 1e-6)
    for _ in range(6):
        clock.seconds(few), clock.seconds(many)
    assert clock.seconds(many) == pytest.approx(2e-4, rel=0.1)
    assert clock.hidden
    assert clock.seconds(few) == pytest.approx(2e-6, rel=0.1)


@pytest.mark.parametrize("error", [RuntimeError("not compiled with CUDA"), AttributeError("_cuda_sleep")])
def test_a_build_without_the_delay_is_timed_all_the_same(error: Exception) -> None:
    card = Card()

    def refuse(cycles: int) -> None:
        raise error

    card._sleep = refuse
    clock = EventClock(card, card.now)
    assert clock.seconds(card.kernels(1, 1e-3)) == pytest.approx(1e-3, rel=0.05)
    assert not clock.hidden


def test_each_device_gets_its_clock() -> None:
    module: Any = Card()
    assert isinstance(device_clock("cpu", None), ProcessorClock)
    assert device_clock("mps", module).name.startswith("host")
    assert isinstance(device_clock("cuda", module), EventClock)
    assert isinstance(device_clock("xpu", module), EventClock)


def test_the_clock_of_a_step_waits_for_the_device() -> None:
    module: Any = Card()
    clock = step_clock("cuda", module)
    clock.seconds(module.kernels(1, 0.5))
    assert module.host >= 0.5


def test_a_clock_that_waits_passes() -> None:
    machine = Machine()
    assert check_clock(machine, machine.work(1.0)) == pytest.approx(4.0)


def test_a_clock_that_stands_still_is_broken() -> None:
    with pytest.raises(BrokenTiming, match="does not wait"):
        check_clock(HostClock(lambda: None, now=lambda: 1.0), lambda: None)


def test_a_clock_that_sees_no_work_is_broken() -> None:
    times = iter(number * 1e-6 for number in count())
    with pytest.raises(BrokenTiming, match="does not wait"):
        check_clock(HostClock(lambda: None, now=lambda: next(times)), lambda: None)


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (lambda card: HostClock(card.synchronize, card.now), False),
        (lambda card: EventClock(card, card.now), False),
        (lambda card: HostClock(lambda: None, card.now), True),
        (lambda card: _Scaled(HostClock(card.synchronize, card.now), 1e3), True),
        (lambda card: _Scaled(EventClock(card, card.now), 1e-3), True),
    ],
    ids=["host", "events", "host that does not wait", "milliseconds", "kiloseconds"],
)
def test_a_value_in_hand_tells_whether_a_clock_waits(make: Callable[[Card], Any], broken: bool) -> None:
    card = Card()
    clock, work = make(card), card.kernels(4, 1e-3)
    check_clock(clock, work)  # launches grow with the work as well, so this alone notices none of them
    if not broken:
        check_clock(clock, work, read=card.synchronize, now=card.now)
        return
    with pytest.raises(BrokenTiming, match="in hand after"):
        check_clock(clock, work, read=card.synchronize, now=card.now)


def test_work_that_is_over_before_its_launch_is_no_alarm() -> None:
    card = Card(launch=2e-5)
    work = card.kernels(3, 1e-6)
    assert check_clock(EventClock(card, card.now), work, read=card.synchronize, now=card.now) == pytest.approx(
        4, rel=0.5
    )


@pytest.mark.parametrize("name", ["Event", "_sleep", "synchronize"])
def test_torch_has_what_the_clock_of_events_calls(name: str) -> None:
    assert callable(getattr(torch.cuda, name))
    assert {"record", "query", "elapsed_time"} <= set(dir(torch.cuda.Event))


class _Scaled:
    """A clock that counts in another unit."""

    name = "scaled"

    def __init__(self, clock: Any, factor: float) -> None:
        self._clock = clock
        self._factor = factor

    def seconds(self, work: Callable[[], object]) -> float:
        return float(self._clock.seconds(work)) * self._factor


def test_repeated_repeats() -> None:
    machine = Machine()
    repeated(machine.work(1, "x"), 3)()
    assert machine.order == "xxx"
