"""The device's counters of bytes, tried on stand-ins that count as torch's allocators do, and as broken ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.measure.allocator import Allocator, peak_above_start


class Counters:
    """A device module that counts bytes; tensors of the CPU that are made through it are told to it."""

    def __init__(self, *, rounding: int = 512, requested: bool = True) -> None:
        self.rounding, self.requested = rounding, requested
        self.now = {"allocated_bytes": 1024, "requested_bytes": 1000 if requested else 0}
        self.most = dict(self.now)

    def take(self, nbytes: int) -> None:
        size = abs(nbytes)
        rounded = -(-size // self.rounding) * self.rounding * (1 if nbytes > 0 else -1)
        self.now["allocated_bytes"] += rounded
        self.now["requested_bytes"] += nbytes if self.requested else 0
        self.most = {name: max(value, self.now[name]) for name, value in self.most.items()}

    def synchronize(self) -> None:
        pass

    def memory_stats(self, device: object) -> dict[str, int]:
        current = {f"{name}.all.current": value for name, value in self.now.items()}
        return current | {f"{name}.all.peak": value for name, value in self.most.items()} | {"num_ooms": 2}

    def memory_allocated(self, device: object) -> int:
        return self.now["allocated_bytes"]

    def max_memory_allocated(self, device: object) -> int:
        return self.most["allocated_bytes"]

    def reset_peak_memory_stats(self, device: object) -> None:
        self.most = dict(self.now)

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 5000, 9000


class Mps:
    """What torch.mps offers: bytes in use, no peak."""

    def synchronize(self) -> None:
        pass

    def current_allocated_memory(self) -> int:
        return 4096


def allocator(module: Any, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    right = torch.empty

    def empty(count: int, **options: Any) -> torch.Tensor:
        if isinstance(module, Counters):
            module.take(count)
        return right(count, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    found = Allocator.of(module, torch.device("cpu"))
    assert found is not None
    if isinstance(module, Counters):
        module.take(-1000)
    return found


def test_bytes_asked_for_are_read_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    exact = allocator(counters, monkeypatch)
    counters.take(700)
    assert (exact.exact, exact.in_use(), exact.slack([700]), exact.lacking) == (True, 1700, 0, None)


def test_rounded_bytes_are_read_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(requested=False)  # as cudaMallocAsync does
    rounded = allocator(counters, monkeypatch)
    counters.take(700)
    assert (rounded.exact, rounded.in_use()) == (False, 1024 + 1024)
    assert rounded.slack([700, 1 << 20]) == 512 + 512 + (1 << 20)


class Async(Counters):
    """What torch.cuda offers over cudaMallocAsync."""

    def get_allocator_backend(self) -> str:
        return "cudaMallocAsync"


class Uncached(Counters):
    """What it offers where caching is off: nothing is counted."""

    def take(self, nbytes: int) -> None:
        pass


@pytest.mark.parametrize(
    ("counters", "said"), [(Async(requested=False), "are the driver's"), (Uncached(), "counts no bytes")]
)
def test_counters_that_say_nothing_of_tensors_are_told(
    monkeypatch: pytest.MonkeyPatch, counters: Counters, said: str
) -> None:
    assert said in (allocator(counters, monkeypatch).lacking or "")


def test_the_peak_is_that_of_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    found = allocator(counters, monkeypatch)
    workspace = iter([512, 0])

    def step() -> None:
        counters.take(next(workspace))
        counters.take(300)
        counters.take(-300)

    assert found.counts_peaks
    assert peak_above_start(found, step, []) == 300


def test_what_is_free_and_how_it_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = allocator(Counters(), monkeypatch)
    assert found.free() == 5000 + 0 - 1024  # nothing is reserved beside what is allocated
    assert found.scatter()["num_ooms"] == 2


def test_a_device_without_peaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = allocator(Mps(), monkeypatch)
    assert (found.counts_peaks, found.in_use(), found.free(), found.scatter()) == (False, 4096, None, {})


def test_the_cpu_counts_nothing() -> None:
    assert Allocator.of(torch.cpu, torch.device("cpu")) is None
    assert Allocator.of(None, torch.device("cpu")) is None
