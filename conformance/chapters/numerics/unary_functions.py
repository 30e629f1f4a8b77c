"""Acceptable results of 16-bit unary ops for each of the 65,536 inputs (fixtures/unary.json)."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from array import array
from typing import Any

import torch

from ...data import fixture
from ...oracles.numbers.formats import Format

Intervals = list["tuple[int, int] | None"]

_FREE = -1  # in the place of an interval's width: any result will do


def ordinal(pattern: int) -> int:
    """Return a 16-bit pattern as an integer that grows with the number: +0 is 0, -0 is -1, the next below -2."""
    return -1 - (pattern & 0x7FFF) if pattern & 0x8000 else pattern


def pattern(ordinal: int) -> int:
    """Return the 16-bit pattern of an ordinal."""
    return ordinal if ordinal >= 0 else (-1 - ordinal) | 0x8000


def ordinals(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ordinals of a 16-bit floating tensor, as int16 on its own device; those of NaNs say nothing."""
    bits = tensor.contiguous().view(torch.int16)
    # -1 - size is the size with all its bits turned and the sign set.
    return bits ^ (bits >> 15 & 0x7FFF)


def encode(intervals: Intervals) -> str:
    """Return intervals as text: differences of the lower ends, and widths, compressed."""
    lows, widths, last = array("h"), array("h"), 0
    for interval in intervals:
        low, high = interval or (last, last + _FREE)
        lows.append((low - last + 2**15) % 2**16 - 2**15)
        widths.append(high - low)
        last = low
    # Bytes of equal weight lie side by side, which compresses to two thirds.
    planes = b"".join(bytes(memoryview(numbers).cast("B")[half::2]) for numbers in (lows, widths) for half in (0, 1))
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def _decode(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower ends and the widths of 65,536 intervals, int32."""
    planes = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)
    quarters = planes.view(4, 2**16).to(torch.int16)
    # Differences wrap around at 16 bits, and so do int16 sums.
    low, width = (quarters[at] | quarters[at + 1] << 8 for at in (0, 2))
    return low.cumsum(0, dtype=torch.int16).int(), width.int()


@functools.cache
def _fixture() -> dict[str, Any]:
    ops: dict[str, Any] = json.loads(fixture("unary.json").read_text(encoding="utf-8"))["ops"]
    return ops


def names() -> list[str]:
    """Return the ops that there is a reference for."""
    return list(_fixture())


@functools.cache
def acceptable(op: str, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last acceptable ordinal for every input pattern of `form`, in order, int32.

    Where any result will do the first is greater than the last; a NaN's ordinal stands for every NaN.
    """
    low, width = _decode(_fixture()[op][form.name])
    return low, low + width


@functools.cache
def _limits(op: str, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the intervals of `acceptable` as int16, with everything in those where any result will do."""
    low, high = acceptable(op, form)
    free = low > high
    return low.masked_fill(free, -(2**15)).short(), high.masked_fill(free, 2**15 - 1).short()


def outside(seen: torch.Tensor, op: str, form: Format) -> torch.Tensor:
    """Return for each of the 65,536 results, in the order of the input patterns, whether it is unacceptable."""
    low, high = _limits(op, form)
    found = _found(seen.cpu(), form)
    return (found < low) | (found > high)


def farthest(seen: torch.Tensor, op: str, form: Format) -> int:
    """Return by how many 16-bit numbers the worst of the results lies outside of its interval: 0 where none does."""
    low, high = (end.int() for end in _limits(op, form))
    found = _found(seen.cpu(), form).int()
    return int(torch.maximum(low - found, found - high).max().clamp(min=0))


def _found(seen: torch.Tensor, form: Format) -> torch.Tensor:
    nan = ordinal(form.infinity) + (1 << (form.fraction_bits - 1))
    return ordinals(seen).masked_fill_(seen.isnan(), nan)
