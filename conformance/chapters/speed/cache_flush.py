"""Find the size of a device's last-level cache, and flush it before a timed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

# Where nothing is reported: the largest last-level cache of any device (L2 of Intel's Data Center GPU Max 1550, by its
# product brief; AMD's Infinity Cache has 256 MiB on MI300X and MI355X, NVIDIA's L2 126 MB on B200).
LARGEST_BYTES = 408 * 2**20

# AMD's cards whose L2, which is all that the properties report, is the last level; later ones and those for games
# have an Infinity Cache behind it.
_L2_IS_LAST = ("gfx906", "gfx908", "gfx90a")

_PROCESSORS = Path("/sys/devices/system/cpu")
_TOLD = ("level", "shared_cpu_list", "size")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes of the device's last-level cache, and in words where the number is from; the most there is if unknown."""
    reported = _of_processors() if device.type == "cpu" else _of_card(device)
    return reported or (LARGEST_BYTES, "unknown, so the largest of any device")


def _of_card(device: torch.device) -> tuple[int, str] | None:
    properties = _properties(device)
    architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    if architecture.startswith("gfx") and architecture not in _L2_IS_LAST:
        return None
    for name in ("L2_cache_size", "last_level_cache_size"):  # of CUDA and ROCm; of XPU, from torch 2.13 on
        if size := getattr(properties, name, None):
            return int(size), f"{name} of the device's properties"
    return None


def _properties(device: torch.device) -> Any:
    try:
        return torch.get_device_module(device).get_device_properties(device)
    except (AttributeError, RuntimeError, AssertionError, TypeError):  # MPS and third parties may have none
        return None


def _of_processors() -> tuple[int, str] | None:
    """Return the caches of the highest level of all processors that this process may run on, by Linux's own account."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[tuple[int, str], int] = {}
    for number in allowed:
        for cache in (_PROCESSORS / f"cpu{number}" / "cache").glob("index*"):
            try:
                level, shared, size = (
                    (cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
                )
                found[int(level), shared] = int(size[:-1]) * _UNITS[size[-1]]
            except (OSError, ValueError, KeyError, IndexError):
                continue
    last = max((level for level, _ in found), default=0)
    total = sum(size for (level, _), size in found.items() if level == last)
    return (total, f"caches of level {last} in {_PROCESSORS}") if total else None


class Flush:
    """Reads and writes twice the bytes of the last-level cache when called, so that nothing else is left in it."""

    def __init__(self, device: torch.device, nbytes: int, source: str = "") -> None:
        self.facts = {"last-level cache, MiB": nbytes / 2**20, "cache as reported by": source}
        self._buffer = torch.zeros(-(-2 * nbytes // 4), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        # Not filled: for large areas processors write past their caches (glibc's memset, non-temporal stores).
        self._buffer.add_(1)
