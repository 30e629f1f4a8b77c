"""Pass the times of the suite and a description of the machine to pytest-benchmark, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .run import Run

_PLUGIN = "benchmark"  # pytest-benchmark's entry point
# With one of these its users ask for its table; without, the table would follow every run of the suite.
_ASKING = ("json", "save", "autosave", "compare", "histogram", "only", "verbose", "csv")
# What a processor does at the moment makes two descriptions of one machine differ.
_JITTER = ("hz_actual", "hz_actual_friendly")
_TIMER: pytest.StashKey[Replay] = pytest.StashKey()


def present(config: pytest.Config) -> bool:
    """Whether pytest-benchmark takes part in this run; where xdist has workers it does not."""
    alone = not hasattr(config, "workerinput") and getattr(config.option, "dist", "no") == "no"
    return alone and config.pluginmanager.has_plugin(_PLUGIN)


def asked(config: pytest.Config) -> bool:
    """Whether the user asks for something of pytest-benchmark, which works in the process that was started alone."""
    return any(getattr(config.option, f"benchmark_{name}", None) for name in (*_ASKING, "skip", "enable"))


def left_out(item: pytest.Item) -> str | None:
    """Say which option of pytest-benchmark leaves `item` out, or None."""
    option = item.config.option
    only, skip = getattr(option, "benchmark_only", False), getattr(option, "benchmark_skip", False)
    if not (only or skip):
        return None
    timed = item.get_closest_marker("timed") is not None
    if only:
        return None if timed else "takes no times, which is all that --benchmark-only leaves"
    return "takes times, which --benchmark-skip leaves out" if timed else None


class Replay:
    """A timer that replays recorded times: each second call returns as much more as the next of them took."""

    __name__ = "conformance"

    def __init__(self) -> None:
        self.used = False
        self._readings: list[float] = []

    def load(self, seconds: Sequence[float]) -> None:
        """Tell `seconds` from now on, each as two readings."""
        self.used = True
        self._readings = [reading for taken in reversed(seconds) for reading in (taken, 0.0)]

    def __call__(self) -> float:
        return self._readings.pop()


class Benchmarks:
    """The hooks that make timed cases benchmarks."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self._run = run
        if not asked(config):
            # Read by pytest-benchmark when it is configured, which is after all other plugins.
            config.option.benchmark_quiet = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let each timed case ask for the fixture `benchmark`, with a timer that replays what the suite measured."""
        for item in items:
            names = getattr(item, "fixturenames", None)
            if names is not None and item.get_closest_marker("timed") is not None and "benchmark" not in names:
                item.fixturenames = [*names, "benchmark"]  # type: ignore[attr-defined]
                item.stash[_TIMER] = Replay()
                item.add_marker(pytest.mark.benchmark(timer=item.stash[_TIMER]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Mark a timed case that recorded no times as skipped by pytest-benchmark."""
        timer, benchmark = item.stash.get(_TIMER, None), getattr(item, "funcargs", {}).get("benchmark")
        if timer is not None and not timer.used and benchmark is not None:
            benchmark.skipped = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Name the devices, the driver and the torch that were timed."""
        for name in _JITTER:
            machine_info.get("cpu", {}).pop(name, None)
        from .header import machine

        machine_info["conformance"] = machine(self._run)


def publish(item: pytest.Item, seconds: Sequence[float], info: Mapping[str, Any]) -> None:
    """Make `seconds` the rounds of the benchmark of `item`, with `info` as its extra_info."""
    timer = item.stash.get(_TIMER, None)
    if timer is None or not seconds:
        return
    benchmark = item.funcargs["benchmark"]  # type: ignore[attr-defined]
    benchmark.extra_info.update(info)
    timer.load(seconds)
    benchmark.pedantic(_told_before, rounds=len(seconds))


def _told_before() -> None:
    """What is benchmarked: nothing, as it has been timed already."""
