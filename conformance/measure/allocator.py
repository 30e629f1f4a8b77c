"""What a device's own allocator says: the bytes in use, their peak since the last reset, how they are scattered."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

WORKSPACES = (76 + 32) << 20
"""Bytes that libraries may take in a step: hipBLASLt 76 MiB or cuBLASLt 32 MiB (aten/src/ATen/cuda, their workspace
sizes), and cuBLAS or rocBLAS another 32 MiB (note on CUDA semantics, cuBLAS workspaces: Hopper)."""

_SMALL = 1 << 20  # a block may be that much larger than what was asked for (c10, CUDACachingAllocator: kSmallSize)
_PROBE = 1000  # bytes, no multiple of any allocator's granularity


class Allocator:
    """The counters of `module` (`torch.cuda`) for `device`.

    `torch.cuda.memory_stats` tells the bytes that were asked for beside those handed out, which are rounded up; where
    it does, `exact` is true and the former are read. Reads wait for the device, on which memory may be freed late.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self.device = module, device
        self._stat = ""
        before, counted = self._stats().get("requested_bytes.all.current"), self._counted()
        probe = torch.empty(_PROBE, dtype=torch.uint8, device=device)
        # An allocator that is not torch's own (cudaMallocAsync) leaves this counter at zero.
        if before is not None and self._stats()["requested_bytes.all.current"] - before == _PROBE:
            self._stat = "requested_bytes.all"
        self._counts = counted is None or self._counted() != counted
        del probe

    @classmethod
    def of(cls, module: ModuleType | None, device: torch.device) -> Allocator | None:
        """Return the counters of a device; None where it has none: `counts_peaks` says whether they tell peaks."""
        needed = ("memory_allocated", "current_allocated_memory")
        return cls(module, device) if any(hasattr(module, name) for name in needed) else None

    @property
    def lacking(self) -> str | None:
        """Say why the counters tell nothing of tensors, and None where they do.

        Expandable segments leave them as they are: c10's CUDACachingAllocator counts blocks, wherever they lie.
        """
        if self._backend() == "cudaMallocAsync":
            return "the counters of cudaMallocAsync are the driver's, of blocks that are freed when the device comes by"
        if not self._counts:
            return "the allocator counts no bytes: caching is off (PYTORCH_NO_CUDA_MEMORY_CACHING), or it is pluggable"
        return None

    @property
    def counts_peaks(self) -> bool:
        """Whether there is a peak that can be reset; MPS has none."""
        return all(hasattr(self._module, name) for name in ("max_memory_allocated", "reset_peak_memory_stats"))

    @property
    def exact(self) -> bool:
        """Whether bytes are those that were asked for, not rounded up."""
        return bool(self._stat)

    def slack(self, storages: Iterable[int]) -> int:
        """Return by how much the count may exceed storages of those bytes: nothing, or what each is rounded up by."""
        return 0 if self.exact else sum(512 + (_SMALL if nbytes >= _SMALL else 0) for nbytes in storages)

    def in_use(self) -> int:
        """Return bytes that tensors occupy now."""
        self._module.synchronize()
        if self._stat:
            return int(self._stats()[f"{self._stat}.current"])
        if hasattr(self._module, "memory_allocated"):
            return int(self._module.memory_allocated(self.device))
        return int(self._module.current_allocated_memory())

    def peak(self) -> int:
        """Return the most bytes in use since the last `reset`."""
        self._module.synchronize()
        if self._stat:
            return int(self._stats()[f"{self._stat}.peak"])
        return int(self._module.max_memory_allocated(self.device))

    def reset(self) -> None:
        """Forget the peak."""
        self._module.synchronize()
        self._module.reset_peak_memory_stats(self.device)

    def free(self) -> int | None:
        """Bytes that can still be had, those that the allocator keeps for later included; None where nobody tells."""
        asked = getattr(self._module, "mem_get_info", None)
        if asked is None:
            return None
        try:
            free = int(asked(self.device)[0])
        except RuntimeError:  # a driver that does not tell (XPU on some systems)
            return None
        stats = self._stats()
        return free + stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)

    def scatter(self) -> dict[str, int]:
        """Return how memory is scattered: counters of `torch.cuda.memory_stats` by name, those that the device has."""
        stats = self._stats()
        return {name: int(stats[name]) for name in _SCATTER if name in stats}

    def _backend(self) -> str:
        """Return the name of the allocator that PYTORCH_CUDA_ALLOC_CONF chose, where torch has several."""
        try:
            return str(self._module.get_allocator_backend())
        except AttributeError:  # no choice, or torch was built without CUDA
            return "native"

    def _counted(self) -> int | None:
        """Return bytes that tensors occupy, without waiting for the device; None where they are told another way."""
        asked = getattr(self._module, "memory_allocated", None)
        return None if asked is None else int(asked(self.device))

    def _stats(self) -> dict[str, Any]:
        asked = getattr(self._module, "memory_stats", None)
        return {} if asked is None else dict(asked(self.device))


_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """Return bytes of memory that a process can still have on a device; None where nobody tells.

    Of a CPU the kernel's own estimate (MemAvailable), which counts what it would give up of its caches.
    """
    if device.type != "cpu":
        counters = Allocator.of(torch.get_device_module(device), device)
        return None if counters is None else counters.free()
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) << 10 if found else None


_SCATTER = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "inactive_split_bytes.all.peak",
    "segment.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def workspace(allocator: Allocator, left: torch.Tensor, right: torch.Tensor) -> int:
    """Return bytes that the product of two matrices takes while it runs, beside operands and result."""
    torch.mm(left, right)  # what a library keeps from its first product on is no part of it
    allocator.reset()
    result = torch.mm(left, right)
    taken = allocator.peak() - allocator.in_use()
    del result
    return taken


def peak_above_start(allocator: Allocator, step: Callable[[], None], leaves: Iterable[torch.Tensor]) -> int:
    """Return peak of the bytes in use during `step` above what was in use before it.

    `step` runs once beforehand, so that the libraries' workspaces are made; the gradients of `leaves` are dropped
    before the measured run, which makes its own.
    """
    step()
    for leaf in leaves:
        leaf.grad = None
    # Garbage of earlier work that is collected during the step would be missing from the peak.
    gc.collect()
    allocator.reset()
    start = allocator.in_use()
    step()
    return allocator.peak() - start
