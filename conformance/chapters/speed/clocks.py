"""Clocks for device time and host time, and the check that a clock can be trusted."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

Work = Callable[[], object]

_EVENTS = "device events"
_FIRST_CYCLES = 200_000  # of the delay in front of the first run: about 0.1 ms
_LONGEST_DELAY = 0.05  # seconds
_MOST_LENGTHENINGS = 8  # till then 16 runs were not hidden
_REMEMBERED = 8  # runs, of both arms
# Seconds, as cudaEventElapsedTime and hipEventElapsedTime document them; SYCL leaves it open, so the coarser one.
_RESOLUTION = {"cuda": 0.5e-6, "hip": 1e-6, "xpu": 1e-6}


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


class ProcessorClock:
    """Time that the threads of this process computed: what the work took, however busy the machine is.

    Waiting is not in it (measure/waits.py counts how often this thread did).
    """

    name = "processor time of this process"

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self._now = now

    def seconds(self, work: Work) -> float:
        start = self._now()
        work()
        return self._now() - start


class EventClock:
    """Time between two events on the device's current stream (CUDA, ROCm, XPU): what the device worked.

    The events are put behind a delay that the device spins away while the host queues the work, so that the time in
    which the device waits for launches does not count. `hidden` says whether that held in the last run: it does not
    where the work waits for the device itself, or where the device module has no such delay.
    """

    def __init__(
        self, module: Any, now: Callable[[], float] = time.perf_counter, resolution: float = _RESOLUTION["cuda"]
    ) -> None:
        self.resolution = resolution
        self._module = module
        self._now = now
        self._cycles = _FIRST_CYCLES if callable(getattr(module, "_sleep", None)) else 0
        self._launches: deque[float | None] = deque(maxlen=_REMEMBERED)  # of runs whose launches were not hidden
        self._lengthened = 0
        self.hidden = False
        self.runs = self.exposed = 0
        self.name = "device events, launches hidden" if self._cycles else _EVENTS

    def seconds(self, work: Work) -> float:
        queued, start, end = (self._module.Event(enable_timing=True) for _ in range(3))
        self._module.synchronize()
        queued.record()
        self._delay()
        start.record()
        before = self._now()
        work()
        launching = self._now() - before
        end.record()
        # Launches are hidden if the device still spun when the last of them was queued.
        self.hidden = bool(self._cycles) and not start.query()
        self.runs += 1
        self.exposed += not self.hidden
        self._module.synchronize()
        if self._cycles:
            self._adapt(None if self.hidden else launching, float(queued.elapsed_time(start)) / 1000)
        return float(start.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds

    def _delay(self) -> None:
        if not self._cycles:
            return
        try:
            self._module._sleep(self._cycles)
        except (AttributeError, NotImplementedError, RuntimeError):  # not public, so a build may lack it
            self._cycles = 0
            self.name = _EVENTS

    def _adapt(self, launching: float | None, delay: float) -> None:
        """Have later delays last twice as long as launches take, where that is seen twice; none where it is in vain.

        Once may be an accident of the host, and first runs load libraries. Work that waits for the device takes longer
        with every delay.
        """
        self._launches.append(launching)
        missed = [each for each in self._launches if each is not None]
        if len(missed) < 2:
            return
        self._launches.clear()
        self._lengthened += 1
        wanted = 2 * min(missed)
        if self._lengthened > _MOST_LENGTHENINGS:
            self._cycles = 0
            self.name = _EVENTS
        elif wanted <= _LONGEST_DELAY:
            # What a cycle takes differs: the clock's at that moment, or a fixed one (Sleep.cu: wall_clock64 on gfx11).
            self._cycles = int(self._cycles * (max(2.0, wanted / delay) if delay > 0 else 2.0))


def device_clock(device_type: str, module: ModuleType | None) -> Clock:
    """Return the finest clock of a device: events where the device stamps them, a CPU's own account, else the host's.

    MPS stamps its events on the host, in a listener's thread once it is told (aten/src/ATen/mps/MPSEvent.mm), which is
    no finer than the host's own clock and not safer.
    """
    if device_type == "cpu" and sys.platform != "win32":  # Windows counts in steps of 16 ms
        return ProcessorClock()
    if device_type in ("cuda", "xpu"):
        return EventClock(module, resolution=_RESOLUTION["hip" if torch.version.hip else device_type])
    return step_clock(device_type, module)


def step_clock(device_type: str, module: ModuleType | None) -> Clock:
    """Return the clock of a whole step as the host sees it."""
    synchronize = getattr(module, "synchronize", None) if device_type != "cpu" else None
    return HostClock(synchronize or (lambda: None))


def repeated(work: Work, times: int) -> Work:
    """`work`, that many times in a row."""

    def run() -> None:
        for _ in range(times):
            work()

    return run


BUSY = 4  # times as many tries at most


def check_clock(
    clock: Clock,
    work: Work,
    *,
    read: Callable[[], object] | None = None,
    tries: int = 5,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many times longer four times the work takes; raises BrokenTiming where the clock cannot be right.

    Below 2 it stands still or does not see the work. A clock that sees launches only grows with them all the same, so
    `read`, where given, has to bring a value to the host that `work` computes, which cannot arrive before the work is
    done. Of the time until then, the clock has to tell at least half of what neither queueing the work nor reading a
    value that is long there explains, and twice all of it at most. The least of several tries, in turn, is taken for
    each time, as disturbances only add to it; there are more of them where they seem to be in all of the first.
    """
    times: dict[str, list[float]] = {"once": [], "fourfold": [], "queueing": [], "in hand": [], "reading": []}
    growth, least, told = 0.0, dict.fromkeys(times, 0.0), True
    for number in range(BUSY * tries):
        if number >= tries and growth >= 2 and told:
            break
        times["once"].append(clock.seconds(work))
        times["fourfold"].append(clock.seconds(repeated(work, 4)))
        if read is not None:
            read()
            start = now()
            work()
            queued = now()
            read()
            in_hand = now()
            read()
            for name, taken in (
                ("queueing", queued - start),
                ("in hand", in_hand - start),
                ("reading", now() - in_hand),
            ):
                times[name].append(taken)
        least = {name: min(taken, default=0.0) for name, taken in times.items()}
        growth = least["fourfold"] / least["once"] if least["once"] > 0 else 0.0
        unexplained = least["in hand"] - least["queueing"] - least["reading"]
        told = read is None or 0.5 * unexplained <= least["once"] <= 2 * least["in hand"]
    if growth < 2:
        raise BrokenTiming(f"four times the work took {growth:.2f} times as long: {clock.name} does not wait for it")
    if not told:
        raise BrokenTiming(
            f"{clock.name} tells {least['once'] * 1e3:.3g} ms for work whose result is in hand after "
            f"{least['in hand'] * 1e3:.3g} ms: it does not wait for it, or counts in another unit"
        )
    return growth
