"""Conditions of a measurement: what spoils one, what is noted only, and where nothing can be told."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.chapters.speed import machine_conditions
from conformance.chapters.speed.machine_conditions import Watch
from tests.simulation.nvml_fake import NVMLError, card, install

CUDA = torch.device("cuda", 0)
US, THEM, ALIEN = os.getpid(), 10_000_001, 10_000_002


class Kernel:
    """Counters of the kernel that a test advances, in place of those under /proc."""

    def __init__(self) -> None:
        self.waited = 7.0
        self.slices = 1000
        self.stolen = 30.0
        self.total = 5000.0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(machine_conditions, "_thread", lambda: (found.waited, found.slices))
    monkeypatch.setattr(machine_conditions, "_machine", lambda: (found.stolen, found.total))
    return found


def _watch(during: Callable[[], object] = lambda: None, device: torch.device = CUDA, seconds: float = 1.0) -> Watch:
    """A watch over `during`, which takes `seconds` on its clock."""
    times: Iterator[float] = (seconds * number for number in count(5))
    watch = Watch(device, now=lambda: next(times))
    with watch:
        during()
    return watch


def _processes(*pids: int) -> list[Any]:
    return [types.SimpleNamespace(pid=pid) for pid in pids]


def _used(percents: dict[int, int]) -> list[Any]:
    return [types.SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in percents.items()]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> dict[Any, Any]:
    """A card in order: warm, alone, at its clock."""
    answers: dict[Any, Any] = {
        ("ClockInfo", 1): 1410,
        "Temperature": 60,
        "PowerUsage": 250_000,
        "CurrentClocksEventReasons": 0,
        ("ViolationStatus", 1): types.SimpleNamespace(violationTime=5_000_000_000),
        ("ViolationStatus", 0): types.SimpleNamespace(violationTime=0),
        "ComputeRunningProcesses": _processes(US),
        "ProcessUtilization": _used({US: 90}),
    }
    return install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108), answers)


def test_a_card_in_order_spoils_nothing(answers: dict[Any, Any]) -> None:
    watch = _watch()

    assert watch.invalid() is None
    facts = watch.facts()
    assert facts["clock before, MHz"] == facts["clock after, MHz"] == 1410
    assert facts["temperature after, C"] == 60
    assert facts["power after, W"] == 250
    assert facts["share of time slowed by heat"] == 0
    assert facts["other processes on the device"] == 0
    assert "clocks held down by" not in facts


@pytest.mark.parametrize(("share", "spoils"), [(0.05, False), (0.15, False), (0.5, True)])
def test_heat_spoils_by_the_share_of_the_time(answers: dict[Any, Any], share: float, spoils: bool) -> None:
    def heat() -> None:
        answers["ViolationStatus", 1] = types.SimpleNamespace(violationTime=5_000_000_000 + int(share * 1e9))
        answers["CurrentClocksEventReasons"] = 0x20  # a moment of it, which the counter says more of

    watch = _watch(heat, seconds=2.0)
    share /= 2

    assert (watch.invalid() is not None) == spoils
    assert not spoils or watch.invalid() == "the device was slowed down by heat for 25% of the time"
    assert watch.facts()["share of time slowed by heat"] == pytest.approx(share)


@pytest.mark.parametrize(("bit", "spoils"), [(0x20, True), (0x40, True), (0x80, True), (0x04, False), (0x08, False)])
def test_a_reason_seen_spoils_where_no_counter_says_for_how_long(
    answers: dict[Any, Any], bit: int, spoils: bool
) -> None:
    answers["ViolationStatus", 1] = NVMLError("not supported")
    answers["CurrentClocksEventReasons"] = NVMLError("an old driver")
    watch = _watch(lambda: answers.update(CurrentClocksThrottleReasons=bit))

    assert (watch.invalid() is not None) == spoils


def test_the_power_supplys_brake_spoils_although_heat_is_counted(answers: dict[Any, Any]) -> None:
    assert "power supply" in str(_watch(lambda: answers.update(CurrentClocksEventReasons=0x80)).invalid())


def test_reasons_before_the_measurement_do_not_count(answers: dict[Any, Any]) -> None:
    answers["CurrentClocksEventReasons"] = 0x80

    assert _watch(lambda: answers.update(CurrentClocksEventReasons=0)).invalid() is None


def test_a_power_cap_is_noted(answers: dict[Any, Any]) -> None:
    def cap() -> None:
        answers["CurrentClocksEventReasons"] = 0x06
        answers["ViolationStatus", 0] = types.SimpleNamespace(violationTime=800_000_000)

    watch = _watch(cap)

    assert watch.invalid() is None
    assert watch.facts()["clocks held down by"] == "clocks set by the user, power cap"
    assert watch.facts()["share of time at the power cap"] == pytest.approx(0.8)


def test_samples_between_runs_add_clocks(answers: dict[Any, Any]) -> None:
    watch = Watch(CUDA)
    with watch:
        for clock in (1400, 900, 1380):
            answers["ClockInfo", 1] = clock
            watch.sample()

    assert [watch.facts()[f"{end} clock, MHz"] for end in ("lowest", "highest")] == [900, 1400]


USED = "other processes used the device for {} of the time"


@pytest.mark.parametrize(
    ("listed", "used", "words"),
    [
        ((US,), {US: 90}, None),
        ((US, THEM), {US: 90}, None),  # another one holds the device and does nothing
        ((US, THEM), {US: 90, THEM: 5}, None),  # a desktop, redrawn now and then
        ((US,), {US: 90, THEM: 15}, USED.format("15%")),  # one that draws is not among those that compute
        ((US, THEM), {US: 60, THEM: 40}, USED.format("40%")),
        ((US, THEM), {THEM: 40}, USED.format("40%")),
        ((US, THEM, ALIEN), {US: 60, THEM: 7, ALIEN: 8}, USED.format("15%")),
        ((US, THEM), None, "1 other process had the device open"),
        ((US, THEM, ALIEN), None, "2 other processes had the device open"),
        ((US,), None, None),
        # Process ids of the host, seen from a container: one of them is ours, the busiest.
        ((ALIEN,), {ALIEN: 90}, None),
        ((ALIEN, THEM), {ALIEN: 90}, None),
        ((ALIEN, THEM), {ALIEN: 90, THEM: 5}, None),
        ((ALIEN, THEM), {THEM: 20, ALIEN: 80}, USED.format("20%")),
        ((ALIEN, THEM), None, "1 other process had the device open"),
        ((), {}, None),
        ((), {ALIEN: 90}, None),
        ((), None, None),
        (None, None, None),
    ],
)
def test_another_process_spoils_if_it_used_the_device(
    answers: dict[Any, Any], listed: tuple[int, ...] | None, used: dict[int, int] | None, words: str | None
) -> None:
    refused = NVMLError("no permission")
    answers["ComputeRunningProcesses"] = refused if listed is None else _processes(*listed)
    answers["ProcessUtilization"] = refused if used is None else _used(used)

    assert _watch().invalid() == words


def test_the_driver_is_asked_who_computed_since_the_measurement_began(answers: dict[Any, Any]) -> None:
    asked: list[int] = []

    def utilization(since: int) -> list[Any]:
        asked.append(since)
        return [*_used({US: 90, THEM: 30}), *_used({THEM: 10})]

    answers["ComputeRunningProcesses"] = _processes(US, THEM)
    answers["ProcessUtilization"] = utilization
    before = time.time() * 1e6

    watch = _watch()

    assert before - 1 <= asked[0] <= time.time() * 1e6  # in microseconds, as NVML stamps its samples
    assert watch.invalid() == USED.format("20%")
    assert watch.facts()["share of the device that they used"] == pytest.approx(0.2)


def test_a_process_that_came_meanwhile_is_seen(answers: dict[Any, Any]) -> None:
    answers["ProcessUtilization"] = NVMLError("not found")
    watch = _watch(lambda: answers.update(ComputeRunningProcesses=_processes(US, THEM)))

    assert watch.invalid() == "1 other process had the device open"
    assert watch.facts()["other processes on the device"] == 1


@pytest.mark.parametrize("function", ["ComputeRunningProcesses", "CurrentClocksEventReasons", "ProcessUtilization"])
def test_a_package_newer_than_the_driver_spoils_nothing(answers: dict[Any, Any], function: str) -> None:
    """nvidia-ml-py raises NVMLLibraryMismatchError, which is no NVMLError."""
    answers[function] = Exception("pyNVML version does not match the NVML lib version")

    assert _watch().invalid() is None


def test_a_driver_that_tells_nothing_spoils_nothing(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108), {})

    watch = _watch()

    assert watch.invalid() is None
    assert not any("clock" in name or "temperature" in name for name in watch.facts())


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("mps"), torch.device("xpu", 0), CUDA])
def test_without_a_vendors_library_the_processor_is_watched(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, device: torch.device
) -> None:
    install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108))

    assert _watch(device=device).invalid() is None
    assert set(_watch(device=device).facts()) >= {"share of time waiting for a processor"}


@pytest.mark.parametrize(
    ("waited", "slices", "spoils"),
    [(0.05, 50, False), (0.15, 50, False), (0.5, 2, False), (0.5, 3, True), (1.0, 50, True), (9.0, 50, True)],
)
def test_a_loaded_processor_spoils(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, waited: float, slices: int, spoils: bool
) -> None:
    def load() -> None:
        kernel.waited += waited
        kernel.slices += slices

    watch = _watch(load, torch.device("cpu"), seconds=2.0)

    share = min(waited / 2, 1)
    words = f"the machine is busy: for {share:.0%} of the time the measurement waited for a processor"
    assert watch.invalid() == (words if spoils else None)
    assert watch.invalid(waiting=False) is None  # to a clock that does not count it
    assert watch.facts()["share of time waiting for a processor"] == share


@pytest.mark.parametrize(("stolen", "total", "spoils"), [(2, 4, False), (3, 4, True), (5, 400, False), (80, 400, True)])
def test_time_that_the_hypervisor_takes_spoils(kernel: Kernel, stolen: float, total: float, spoils: bool) -> None:
    def steal() -> None:
        kernel.stolen += stolen
        kernel.total += total

    words = f"the machine is shared: its host took {stolen / total:.0%} of the processors' time"
    watch = _watch(steal, torch.device("cpu"))
    assert watch.invalid() == (words if spoils else None)
    assert watch.facts()["share of time stolen from the machine"] == stolen / total


def test_a_system_without_proc_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)

    watch = _watch(device=torch.device("cpu"))

    assert watch.invalid() is None
    assert not any("share" in name for name in watch.facts())


def test_the_kernels_files_are_read_as_it_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """sched-stats.rst: nanoseconds of waiting are second, timeslices third; proc(5): what was stolen is eighth."""
    files = {
        "/proc/thread-self/schedstat": "812345678 250000000 7\n",
        "/proc/stat": "cpu  1 2 3 4 5 6 7 80 1000 1000\ncpu0 9 9 9 9 9 9 9 9 9 9\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])

    assert machine_conditions._thread() == (0.25, 7)
    assert machine_conditions._machine() == (80, 108)  # guests' time is in the user's already
    files["/proc/stat"] = "cpu 1 2 3 4\n"  # an old kernel
    assert machine_conditions._machine() == (None, 0.0)


def test_the_kernels_own_counters_are_read() -> None:
    """On this machine: numbers, and no worse than what can be."""
    facts = _watch(lambda: sum(range(10_000)), torch.device("cpu")).facts()

    assert all(0 <= value <= 1 for name, value in facts.items() if name.startswith("share"))


def test_an_amd_device_is_asked_through_torch(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    install(monkeypatch, card("AMD Instinct MI300X", 9, 4, 304), hip="6.4")
    listing = (
        f"GPU:0\nprocess {US:>10d} uses {12.5:>12.3f} MB GPU memory\nprocess {THEM:>10d} uses {0:>12.3f} MB GPU memory"
    )
    told: dict[str, Callable[[Any], Any]] = {
        "clock_rate": lambda device: 2100,
        "temperature": lambda device: 55,
        "power_draw": lambda device: 600,
        "list_gpu_processes": lambda device: listing,
    }
    for name, answer in told.items():
        monkeypatch.setattr(torch.cuda, name, answer)

    watch = _watch()

    assert watch.invalid() is None  # the other one holds no memory of the device
    assert watch.facts()["clock after, MHz"] == 2100
    assert watch.facts()["power after, W"] == 600
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda device: listing.replace("0.000 MB", "9.000 MB"))
    assert _watch().invalid() == "1 other process had the device open"


def test_an_amd_device_without_its_library_is_not_judged(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    install(monkeypatch, card("AMD Instinct MI300X", 9, 4, 304), hip="6.4")

    def absent(device: Any) -> Any:
        raise ModuleNotFoundError("amdsmi does not seem to be installed")

    for name in ("clock_rate", "temperature", "power_draw", "list_gpu_processes"):
        monkeypatch.setattr(torch.cuda, name, absent)

    assert _watch().invalid() is None


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), Watch(torch.device("cpu")):
        raise RuntimeError("out of memory")
