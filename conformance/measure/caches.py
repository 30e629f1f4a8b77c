"""Caches: how large a device's last-level cache is, and how it is emptied before a run that is timed."""

from __future__ import annotations

from typing import Any

import torch

# Where a driver tells nothing: the largest last-level cache of a card (AMD's Infinity Cache of MI300X and MI355X).
LARGEST_BYTES = 256 * 2**20


def last_level_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes of the device's last-level cache, and in words where the number is from; the most there is if unknown."""
    properties: Any = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
    known = getattr(properties, "L2_cache_size", None)
    if known and torch.version.hip is None:
        return int(known), "L2_cache_size of the device properties"
    return LARGEST_BYTES, "unknown, so the largest of any card"


class Flush:
    """Overwrites twice the bytes of the last-level cache when called, so that nothing of earlier work is left in it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._buffer = torch.empty(2 * nbytes, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()
