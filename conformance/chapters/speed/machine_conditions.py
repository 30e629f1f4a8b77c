"""Conditions of a measurement on the device and the processor, and the reasons that invalidate it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...measure.nvml import MHZ, Nvml, nvml

# The share of a measurement that may be disturbed: medians of interleaved pairs keep their verdicts with one outlier in
# ten (docs/measuring.md).
DISTURBED = 0.1
# A wait or two touch a pair or two, which an order-statistic interval drops, however short the measurement is.
_FEW_WAITS = 2

# nvml.h, nvmlClocksEventReasons: each says that the clock is held down by heat or by the server's power supply. Left
# out: idle, clocks that the user set, power caps and sync boost, which are how a card runs under load and weigh on both
# arms alike; and HwSlowdown, which drivers also report while a clock changes.
_SLOWED = {0x20: "slowed down by heat (software)", 0x40: "slowed down by heat", 0x80: "slowed down by the power supply"}
_NOTED = {0x02: "clocks set by the user", 0x04: "power cap", 0x10: "sync boost"}

_PROCESS = re.compile(r"process\s+(\d+)\s+uses\s+([\d.]+)")


@dataclass(frozen=True)
class _Processor:
    """Counters of the kernel (sched-stats, proc(5)): of this thread, and of all processors together."""

    waited: float | None  # seconds in which this thread was ready to run and another one ran
    slices: int  # how often this thread was let run
    stolen: float | None  # ticks in which the hypervisor ran something else
    total: float  # ticks

    @classmethod
    def read(cls) -> _Processor:
        waited, slices = _thread()
        stolen, total = _machine()
        return cls(waited, slices, stolen, total)


def _thread() -> tuple[float | None, int]:
    try:
        _, waited, slices = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return None, 0
    return int(waited) * 1e-9, int(slices)


def _machine() -> tuple[float | None, float]:
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None, 0.0
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else (None, 0.0)


@dataclass(frozen=True)
class _Device:
    """A device's readings at one moment; None for what it does not report."""

    hertz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    reasons: int | None = None
    slowed_by_heat: float | None = None  # seconds since the driver was loaded
    slowed_by_power: float | None = None
    processes: frozenset[int] | None = None

    @classmethod
    def read(cls, device: torch.device, known: Nvml | None) -> _Device:
        if known is not None:
            return _nvidia(known)
        return _amd(device) if device.type == "cuda" and torch.version.hip is not None else cls()


def _nvidia(known: Nvml) -> _Device:
    milliwatts = known.ask("PowerUsage")
    processes = known.ask("ComputeRunningProcesses")
    reasons = known.ask("CurrentClocksEventReasons")
    return _Device(
        hertz=known.clock("SM"),
        celsius=known.ask("Temperature", known.constant("TEMPERATURE_GPU")),
        watts=None if milliwatts is None else milliwatts / 1e3,
        reasons=known.ask("CurrentClocksThrottleReasons") if reasons is None else reasons,
        slowed_by_heat=_violation(known, "THERMAL"),
        slowed_by_power=_violation(known, "POWER"),
        processes=None if processes is None else frozenset(one.pid for one in processes),
    )


def _violation(known: Nvml, policy: str) -> float | None:
    """Return seconds for which a policy held the clock down; nvmlViolationTime_t counts nanoseconds."""
    found = known.ask("ViolationStatus", known.constant(f"PERF_POLICY_{policy}"))
    return None if found is None else found.violationTime * 1e-9


def _amd(device: torch.device) -> _Device:
    """Return torch's readings of an AMD device through amdsmi, if that is installed."""
    megahertz = _told(torch.cuda.clock_rate, device)
    listed = _told(torch.cuda.list_gpu_processes, device)
    processes = _PROCESS.findall(listed or "")
    return _Device(
        hertz=megahertz * MHZ if megahertz else None,
        celsius=_told(torch.cuda.temperature, device),
        watts=_told(torch.cuda.power_draw, device),  # amdsmi gives W where NVML gives mW, and torch passes either on
        processes=frozenset(int(pid) for pid, megabytes in processes if float(megabytes) > 0) or None,
    )


def _told(function: Callable[..., Any], device: torch.device) -> Any:
    try:
        return function(device)
    except Exception:  # the vendor's library is absent, of another version, or may not be asked by this user
        return None


class Watch:
    """Watches device and processor while something is measured: a context manager.

    Afterwards `invalid` gives the reason why the measurement is invalid, and `facts` the conditions. Reading takes
    place outside the measurement, at its beginning and end; `sample`, called between runs, adds clocks and reasons of
    those moments. Readings that a vendor's library does not provide are left out.
    """

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._now = now
        self._elapsed = 0.0
        self._known: Nvml | None = None
        self._samples: list[_Device] = []
        self._used: dict[int, float] | None = None

    def __enter__(self) -> Watch:
        self._known = nvml(self._device)
        self._since = int(time.time() * 1e6)
        self._samples = [_Device.read(self._device, self._known)]
        self._processor = [_Processor.read()]
        self._start = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._elapsed = max(self._now() - self._start, 1e-9)
        self._processor.append(_Processor.read())
        self.sample()
        self._used = self._shares()

    def sample(self) -> None:
        """Read the device now; call it between timed runs, never inside one."""
        self._samples.append(_Device.read(self._device, self._known))

    def invalid(self, *, waiting: bool = True) -> str | None:
        """Return why the measurement is invalid; None if it is valid.

        `waiting` says whether the clock counts the time in which the process waits for a processor.
        """
        reasons = [*self._heat(), *self._others(), *(self._load() if waiting else ())]
        return "; ".join(reasons) or None

    def facts(self) -> dict[str, Any]:
        """Return the conditions as far as they are known, numbers and texts by name, for the evidence."""
        first, last = self._samples[0], self._samples[-1]
        used, ticks = self._used_by_others(), self._ticks()
        clocks = [one.hertz / MHZ for one in self._samples[1:] if one.hertz is not None]
        facts = {
            "clock before, MHz": None if first.hertz is None else first.hertz / MHZ,
            "clock after, MHz": None if last.hertz is None else last.hertz / MHZ,
            "lowest clock, MHz": min(clocks, default=None),
            "highest clock, MHz": max(clocks, default=None),
            "temperature before, C": first.celsius,
            "temperature after, C": last.celsius,
            "power after, W": last.watts,
            "clocks held down by": self._held_down() or None,
            "share of time slowed by heat": _share(self._gone("slowed_by_heat"), self._elapsed),
            "share of time at the power cap": _share(self._gone("slowed_by_power"), self._elapsed),
            "other processes on the device": self._foreign(),
            "share of the device that they used": None if used is None else round(min(used, 1.0), 4),
            "share of time waiting for a processor": _share(self._waited(), self._elapsed),
            "share of time stolen from the machine": None if ticks is None else _share(*ticks),
            "load average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        }
        return {name: value for name, value in facts.items() if value is not None}

    # --- the device ---

    def _gone(self, counter: str) -> float | None:
        """Return by how much a counter of the device has grown."""
        first, last = (getattr(one, counter) for one in (self._samples[0], self._samples[-1]))
        return None if first is None or last is None else max(last - first, 0.0)

    def _held_down(self) -> str:
        seen = self._reasons()
        return ", ".join(words for bit, words in (_SLOWED | _NOTED).items() if seen & bit)

    def _reasons(self) -> int:
        """All reasons seen since the measurement began; before it, the device was idle, or did something else."""
        seen = 0
        for one in self._samples[1:]:
            seen |= one.reasons or 0
        return seen

    def _heat(self) -> Iterable[str]:
        slowed = self._gone("slowed_by_heat")
        if slowed is not None and slowed > DISTURBED * self._elapsed:
            yield f"the device was slowed down by heat for {min(slowed / self._elapsed, 1):.0%} of the time"
        for bit, words in _SLOWED.items():
            # The counter says for how long, a reason only that it was so at a moment.
            if self._reasons() & bit and (slowed is None or "heat" not in words):
                yield f"the device was {words}"

    def _processes(self) -> frozenset[int] | None:
        """Return all processes that had the device open at the beginning or at the end, this one among them."""
        listed = [one.processes for one in (self._samples[0], self._samples[-1]) if one.processes is not None]
        return frozenset[int]().union(*listed) if listed else None

    def _foreign(self) -> int | None:
        """Return how many other processes had the device open.

        In a container the driver gives the process ids of the host: then ours is one of those that are not ours.
        """
        listed = self._processes()
        return None if listed is None else len(listed - {os.getpid()}) - (bool(listed) and os.getpid() not in listed)

    def _shares(self) -> dict[int, float] | None:
        """Return each process's share of the processors' time since the beginning; None if it is not reported.

        A process that did nothing may be absent.
        """
        samples = None if self._known is None else self._known.ask("ProcessUtilization", self._since)
        if samples is None:
            return None
        percents: dict[int, list[int]] = {}
        for one in samples:
            percents.setdefault(one.pid, []).append(one.smUtil)
        return {pid: sum(seen) / len(seen) / 100 for pid, seen in percents.items()}

    def _used_by_others(self) -> float | None:
        """Return the share of the processors' time that other processes used; None if it is not reported."""
        if self._used is None:
            return None
        if os.getpid() in (self._processes() or ()):
            return sum(share for pid, share in self._used.items() if pid != os.getpid())
        # Of ids that are not ours, ours is the one that is busiest: it is measuring.
        return sum(sorted(self._used.values())[:-1])

    def _others(self) -> Iterable[str]:
        used, foreign = self._used_by_others(), self._foreign()
        if used is not None and used > DISTURBED:
            yield f"other processes used the device for {min(used, 1):.0%} of the time"
        elif used is None and foreign:
            yield f"{foreign} other process{'es' if foreign > 1 else ''} had the device open"

    # --- the processor ---

    def _waited(self) -> float | None:
        first, last = self._processor
        return None if first.waited is None or last.waited is None else last.waited - first.waited

    def _ticks(self) -> tuple[float, float] | None:
        """Return ticks of all processors together: those that the hypervisor took, and all."""
        first, last = self._processor
        if first.stolen is None or last.stolen is None:
            return None
        return last.stolen - first.stolen, last.total - first.total

    def _load(self) -> Iterable[str]:
        waited, slices = self._waited(), self._processor[1].slices - self._processor[0].slices
        if waited is not None and waited > DISTURBED * self._elapsed and slices > _FEW_WAITS:
            share = min(waited / self._elapsed, 1)
            yield f"the machine is busy: for {share:.0%} of the time the measurement waited for a processor"
        stolen, total = self._ticks() or (0.0, 0.0)
        if stolen > DISTURBED * total and stolen > _FEW_WAITS:
            yield f"the machine is shared: its host took {stolen / total:.0%} of the processors' time"


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else round(min(part / whole, 1.0), 4)
