"""Timings on a busy machine: which clocks count the time in which the host waited for a processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from conformance.chapters.speed import timing
from conformance.chapters.speed.clocks import EventClock, HostClock, ProcessorClock


def test_a_host_clock_counts_waiting_and_a_processor_clock_does_not() -> None:
    assert timing._counts_waiting(HostClock(lambda: None), 0, 0)
    assert not timing._counts_waiting(ProcessorClock(), 0, 0)


@pytest.mark.parametrize(("exposed", "counts"), [(0, False), (10, False), (11, True), (100, True)])
def test_a_clock_of_the_device_counts_it_where_launches_showed(exposed: int, counts: bool) -> None:
    clock = EventClock(SimpleNamespace())
    clock.runs, clock.exposed = 7, 7  # of an earlier measurement
    before = timing._runs(clock)
    clock.runs, clock.exposed = 7 + 100, 7 + exposed
    assert timing._counts_waiting(clock, *before) is counts
