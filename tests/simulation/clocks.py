"""Devices and clocks that are made up: noise of every kind that machines show, caches, and timers that do not wait."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Noise = Iterator[float]  # for each run, by how much longer it takes than it should

_RECORDED = json.loads(Path(__file__).with_name("recorded_noise.json").read_text())["times"]


def scatter(rng: random.Random, sigma: float = 0.02) -> Noise:
    """Independent, symmetric scatter of each run."""
    while True:
        yield math.exp(rng.gauss(0, sigma))


def drift(rng: random.Random, runs: int = 72, by: float = 0.05) -> Noise:
    """Runs take longer and longer, by 5 % in all, in one direction: a device that heats up."""
    for number, noise in enumerate(scatter(rng)):
        yield noise * (1 + by * min(1.0, number / runs))


def bimodal(rng: random.Random, gap: float = 1.3) -> Noise:
    """Every run at one of two clocks, by a fair coin."""
    for noise in scatter(rng):
        yield noise * rng.choice((1.0, gap))


def dwelling(rng: random.Random, gap: float = 1.3, runs: int = 10) -> Noise:
    """Two clocks, each kept for ten runs on average."""
    slow = False
    for noise in scatter(rng):
        slow ^= rng.random() < 1 / runs
        yield noise * (gap if slow else 1.0)


def heavy(rng: random.Random) -> Noise:
    """Delays with a tail so heavy that they have neither mean nor variance (half of a Cauchy distribution)."""
    for noise in scatter(rng, 0.005):
        yield noise + 0.02 * abs(math.tan(math.pi * (rng.random() - 0.5)))


def outliers(rng: random.Random) -> Noise:
    """One run in ten takes five times as long."""
    for noise in scatter(rng):
        yield noise * (5.0 if rng.random() < 0.1 else 1.0)


def autocorrelated(rng: random.Random, memory: float = 0.45, sigma: float = 0.04) -> Noise:
    """Scatter that resembles that of the run before; at this memory ABBA's ratios resemble each other most."""
    level = rng.gauss(0, sigma)
    while True:
        yield math.exp(level)
        level = memory * level + math.sqrt(1 - memory**2) * rng.gauss(0, sigma)


def rhythm(rng: random.Random, by: float = 0.01) -> Noise:
    """Noise with the period of ABBA: two runs of four slower than the others."""
    start = rng.randrange(4)
    for number, noise in enumerate(scatter(rng, 0.004), start):
        yield noise * math.exp(by * (1, -1, -1, 1)[number % 4])


def throttled(rng: random.Random, runs: int = 37, by: float = 0.12) -> Noise:
    """A saw-tooth: the clock falls as the device heats up, and recovers at once."""
    start = rng.randrange(runs)
    for number, noise in enumerate(scatter(rng, 0.01), start):
        yield noise * (1 + by * (number % runs) / runs)


def busy(rng: random.Random) -> Noise:
    """A processor that others use in bursts: for a geometric number of runs everything takes up to twice as long."""
    left, factor = 0, 1.0
    for noise in scatter(rng):
        if left == 0:
            left = 1 + int(rng.expovariate(1 / 6))
            factor = 1 + rng.random() if factor == 1.0 else 1.0
        left -= 1
        yield noise * factor


def recorded(rng: random.Random) -> Noise:
    """Times of one and the same product on a shared two-core machine under load, from a random place on."""
    start = rng.randrange(len(_RECORDED))
    return itertools.cycle(_RECORDED[start:] + _RECORDED[:start])


NOISES: dict[str, Callable[[random.Random], Noise]] = {
    "scatter of 2 %": scatter,
    "drift of 5 %": drift,
    "two clocks, run by run": bimodal,
    "two clocks, ten runs each": dwelling,
    "heavy tail": heavy,
    "one outlier in ten": outliers,
    "autocorrelated": autocorrelated,
    "rhythm of four runs": rhythm,
    "throttled and recovering": throttled,
    "others in bursts": busy,
    "recorded": recorded,
}


class Machine:
    """A device on which work takes its seconds, times the noise of that run; its own clock, which tells them."""

    name = "simulated"

    def __init__(self, noise: Noise | None = None) -> None:
        self.now = 0.0
        self.order = ""
        self._noise = itertools.repeat(1.0) if noise is None else noise

    def work(self, seconds: float, name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.order += name
            self.now += seconds * next(self._noise)

        return run

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


class Cached(Machine):
    """A machine whose cache keeps the data of some work: it then takes `warm` of its time, until the cache is flushed.

    Work on `large` data finds none of it in the cache, and drives everything else out of it.
    """

    def __init__(self, noise: Noise, warm: float = 0.75) -> None:
        super().__init__(noise)
        self._warm = warm
        self._held: set[str] = set()

    def cached(self, seconds: float, name: str) -> Callable[[], None]:
        """Work that keeps its data in the cache."""
        cold, warm = self.work(seconds, name), self.work(seconds * self._warm, name)

        def run() -> None:
            (warm if name in self._held else cold)()
            self._held.add(name)

        return run

    def flush(self) -> None:
        self._held.clear()


class Asynchronous:
    """A device that works through a queue while the host goes on; both have times of their own.

    `launch` is what queueing costs the host, `latency` what it takes to hear from the device.
    """

    def __init__(self, launch: float = 1e-5, latency: float = 1e-5) -> None:
        self.host = 0.0
        self.device = 0.0
        self._launch = launch
        self._latency = latency

    def now(self) -> float:
        return self.host

    def queue(self, seconds: float) -> None:
        """Have the device work that long, after what is queued already."""
        self.host += self._launch
        self.device = max(self.device, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.device) + self._latency
