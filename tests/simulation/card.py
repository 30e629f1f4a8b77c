"""A made-up GPU: how long its kernels take, what its memory holds, and which disturbances it suffers."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

GIB = 1 << 30
ROUNDING = 512  # c10/cuda/CUDACachingAllocator: kMinBlockSize
CACHE_GAIN = 4.0  # how many times faster a last-level cache is than the memory behind it; 3 to 5 on NVIDIA's cards


@dataclass(frozen=True)
class Card:
    """A card as its data sheet has it: rates in FLOP/s and bytes/s that it reaches, sizes in bytes, times in seconds.

    `tf32` and `low` are None where the card has no such units. `launch` is what the host spends on one operation,
    `least` the shortest time that a kernel takes.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    hertz: float
    memory_bytes: int
    cache_bytes: int
    bandwidth: float
    fp32: float
    tf32: float | None
    low: float
    bf16: bool = True
    launch: float = 5e-6
    least: float = 2e-6


# Peaks of the data sheets times 0.8, which large products reach on the cards that are measured in public.
H100 = Card(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9, 79 * GIB, 50 << 20, 0.8 * 3.35e12, 5.3e13, 0.8 * 494e12, 0.8 * 989e12
)
RTX_4090 = Card(
    *("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9, 23 * GIB, 72 << 20, 0.8e12, 6.6e13, 6.6e13, 0.8 * 165.2e12)
)
T4 = Card("Tesla T4", (7, 5), 40, 1.59e9, 14 * GIB, 4 << 20, 0.8 * 3.2e11, 6.5e12, None, 0.8 * 65e12, bf16=False)
GTX_1660 = Card(
    *("NVIDIA GeForce GTX 1660 Ti", (7, 5), 24, 1.77e9, 6 * GIB, 3 << 19, 2.3e11, 4.3e12, None, 4.3e12), bf16=False
)
MIG_1G = Card(
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 14, 1.41e9, 1 * GIB, 5 << 20, 1.5e11, 2e12, 1.6e13, 3.2e13),
)


@dataclass(frozen=True)
class Kernel:
    """One launch: what ran, in which arithmetic, and the seconds it takes undisturbed, at which time of the device."""

    op: str
    arithmetic: str
    flops: float
    nbytes: float
    seconds: float
    start: float

    @property
    def low(self) -> bool:
        return self.arithmetic in ("float16", "bfloat16")


Disturbance = Callable[[Kernel], float]


def steady(kernel: Kernel) -> float:
    """Nothing disturbs."""
    return 1.0


def jitter(spread: float, seed: int = 0) -> Disturbance:
    """Each kernel a little longer or shorter, as every card has it: log-normal, of relative width `spread`."""
    rng = random.Random(seed)
    return lambda kernel: math.exp(spread * rng.gauss(0, 1))


def slower(factor: float, which: Callable[[Kernel], bool]) -> Disturbance:
    """Those kernels take `factor` times as long."""
    return lambda kernel: factor if which(kernel) else 1.0


def drift(share: float, over: float) -> Disturbance:
    """The card becomes slower by that share within `over` seconds, steadily: it heats up."""
    return lambda kernel: 1 + share * min(1.0, kernel.start / over)


def bimodal(share: float, period: float, seed: int = 0) -> Disturbance:
    """The card has two clocks and picks one for each `period` of time; the slower one takes that share longer."""
    return lambda kernel: 1 + share * (random.Random(f"{seed} {int(kernel.start / period)}").random() < 0.5)


def outliers(one_in: int, factor: float, period: float, seed: int = 0) -> Disturbance:
    """One period of time in so many is disturbed by a factor."""
    return lambda kernel: factor if random.Random(f"{seed} {int(kernel.start / period)}").random() * one_in < 1 else 1.0


class Timeline:
    """Two clocks, the host's and the device's queue: the host runs ahead until it waits."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.disturbances: list[Disturbance] = []
        self.host = 0.0
        self.queue = 0.0
        """When the device will have done all that was launched."""
        self.waits = 0
        self.kernels: list[Kernel] = []
        self.keep = False
        """Whether the kernels are listed."""
        self._cached: OrderedDict[int, int] = OrderedDict()

    def launch(self, op: str, arithmetic: str, flops: float, touched: dict[int, int]) -> None:
        """Queue one kernel that touches those storages (by identity, in bytes)."""
        nbytes = self._through_cache(touched)
        seconds = max(flops / self._rate(arithmetic), nbytes / self.card.bandwidth, self.card.least)
        self.host += self.card.launch
        start = max(self.host, self.queue)
        kernel = Kernel(op, arithmetic, flops, nbytes, seconds, start)
        for disturbance in self.disturbances:
            seconds *= disturbance(kernel)
        self.queue = start + seconds
        if self.keep:
            self.kernels.append(kernel)

    def spend(self, seconds: float) -> None:
        """The host works for a while."""
        self.host += seconds

    def occupy(self, seconds: float) -> None:
        """Queue something that only takes time."""
        self.host += self.card.launch
        self.queue = max(self.host, self.queue) + seconds

    def wait(self) -> None:
        """The host waits until the device is idle."""
        self.waits += 1
        self.host = max(self.host, self.queue) + self.card.launch

    def now(self) -> float:
        """The host's clock, which a look at it advances a little, as a real one."""
        self.host += 1e-7
        return self.host

    def mark(self) -> float:
        """The time at which an event recorded now comes to pass on the device."""
        self.host += self.card.launch / 4
        return max(self.host, self.queue)

    def _rate(self, arithmetic: str) -> float:
        if arithmetic in ("float16", "bfloat16"):
            return self.card.low
        if arithmetic == "tf32" and self.card.tf32 is not None:
            return self.card.tf32
        return self.card.fp32

    def _through_cache(self, touched: dict[int, int]) -> float:
        """Bytes that count as memory traffic: those of storages in the last-level cache count for a part."""
        counted = 0.0
        for key, nbytes in touched.items():
            counted += nbytes / CACHE_GAIN if key in self._cached else nbytes
            self._cached.pop(key, None)
            if nbytes <= self.card.cache_bytes:
                self._cached[key] = nbytes
            else:
                self._cached.clear()  # it ran through and pushed everything out
        while sum(self._cached.values()) > self.card.cache_bytes:
            self._cached.popitem(last=False)
        return counted


class Memory:
    """An allocator that knows which storages live, by weak references, and the most that lived at once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        self.allocations = 0
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._bound = 0
        self._most = 0
        self._requested_peak = 0

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is known; raises torch.OutOfMemoryError where it does not fit."""
        reference = StorageWeakRef(storage)
        if reference.cdata in self._live or storage.nbytes() == 0:
            return
        rounded = -(-storage.nbytes() // ROUNDING) * ROUNDING
        # What died is looked for only where it matters: at a new peak.
        if self._bound + rounded > self.peak:
            self._bound = self.allocated
        if self._bound + rounded > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {rounded / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.total / GIB:.2f} GiB of which {(self.total - self._bound) / 2**20:.2f} MiB is free."
            )
        self._live[reference.cdata] = (reference, rounded, storage.nbytes())
        self._bound += rounded
        self.allocations += 1
        if self._bound > self.peak:
            self.peak = self._bound
            self._most = max(self._most, self.peak)
            self._requested_peak = max(self._requested_peak, self.requested)

    @property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        self._live = {key: row for key, row in self._live.items() if not row[0].expired()}
        return sum(rounded for _, rounded, _ in self._live.values())

    @property
    def requested(self) -> int:
        """Bytes of live blocks before they were rounded."""
        return sum(asked for reference, _, asked in self._live.values() if not reference.expired())

    def reset_peak(self) -> None:
        self._bound = self.peak = self.allocated
        self._requested_peak = self.requested

    def statistics(self) -> dict[str, int]:
        """What torch.cuda.memory_stats tells of all pools."""
        allocated = self.allocated
        return {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": self.peak,
            "active_bytes.all.current": allocated,
            "active_bytes.all.peak": self.peak,
            "requested_bytes.all.current": self.requested,
            "requested_bytes.all.peak": self._requested_peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved,
            "inactive_split_bytes.all.current": self.reserved - allocated,
            "inactive_split_bytes.all.peak": self.reserved,
            "allocation.all.allocated": self.allocations,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @property
    def reserved(self) -> int:
        """Bytes taken from the card, in segments of 2 MiB, never given back."""
        return -(-self._most // (2 << 20)) * (2 << 20)


def touched_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes that a kernel reads or writes in each storage; an expanded view counts what it shows once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        shown = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        seen[storage._cdata] = seen.get(storage._cdata, 0) + shown
    return seen


class Simulation:
    """The card in use: its clock, its memory, and what is wrong with how it is driven."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.timeline = Timeline(card)
        self.memory = Memory(card.memory_bytes)
        self.paused = False
        """Whether what runs now costs neither time nor memory."""
        self.workspace: torch.Tensor | None = None
        self.tf32_is_stuck = False
        """Whether fp32 products run in TF32 whatever the flags say."""
        self.profiling = 0.0
        """Seconds that the host takes to start a profiler and to read what it saw."""
        self.peaks_are_stuck = False
        """Whether a reset of the peak does nothing."""
