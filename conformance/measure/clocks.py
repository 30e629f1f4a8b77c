"""Clocks: how long work takes, on the device alone or as the host waits for it, and whether a clock can be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

Work = Callable[[], object]


class BrokenTiming(RuntimeError):
    """A clock showed what cannot be: it does not wait for the work, or the work outran the hardware."""


class Clock(Protocol):
    """Times one piece of work on one device."""

    name: str

    def seconds(self, work: Work) -> float:
        """Do `work` once; the seconds it took, its work on the device included."""


class HostClock:
    """Wall time from an idle device to an idle device: what a user waits for."""

    name = "host clock, synchronised"

    def __init__(self, synchronize: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._now = now

    def seconds(self, work: Work) -> float:
        self._synchronize()
        start = self._now()
        work()
        self._synchronize()
        return self._now() - start


class EventClock:
    """Time between two events on the device's stream (CUDA, ROCm, XPU): what the device worked."""

    name = "device events"

    def __init__(self, module: Any) -> None:
        self._module = module

    def seconds(self, work: Work) -> float:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        self._module.synchronize()
        start.record()
        work()
        end.record()
        self._module.synchronize()
        return float(start.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds


def device_clock(device_type: str, module: ModuleType | None) -> Clock:
    """The finest clock of a device: events where its module has them, else the host's."""
    if device_type in ("cuda", "xpu"):
        return EventClock(module)
    return step_clock(device_type, module)


def step_clock(device_type: str, module: ModuleType | None) -> Clock:
    """The clock of a whole step as the host sees it."""
    synchronize = getattr(module, "synchronize", None) if device_type != "cpu" else None
    return HostClock(synchronize or (lambda: None))


def repeated(work: Work, times: int) -> Work:
    """`work`, that many times in a row."""

    def run() -> None:
        for _ in range(times):
            work()

    return run


def check_clock(clock: Clock, work: Work, *, tries: int = 5) -> float:
    """How many times longer four times the work takes; raises BrokenTiming below 2: the clock does not wait.

    A clock that only sees the launch, or that stands still, shows no such growth. The least of several tries is taken
    for both, as disturbances only add time.
    """
    once = min(clock.seconds(work) for _ in range(tries))
    fourfold = min(clock.seconds(repeated(work, 4)) for _ in range(tries))
    growth = fourfold / once if once > 0 else 0.0
    if growth < 2:
        raise BrokenTiming(f"four times the work took {growth:.2f} times as long: {clock.name} does not wait for it")
    return growth
