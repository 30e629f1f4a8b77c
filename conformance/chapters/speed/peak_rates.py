"""Upper bounds of a device's rates, published rates, and the batch at which AMP breaks even."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ...data import fixture, read_toml
from ...measure.nvml import nvml
from .clocks import BrokenTiming

TERA, GIGA = 1e12, 1e9

# Bytes that AMP moves for each weight in a training step beside the work itself, and FLOP that a row of the batch costs
# for each weight: the weight is read in 4 bytes and written in 2, its gradient read in 2 and written in 4; unscaling
# reads and writes 4. A product forward is 2 FLOP a weight and row, the two backward 4.
_CAST_WEIGHT, _CAST_GRADIENT, _UNSCALE = 4 + 2, 2 + 4, 4 + 4
_FORWARD, _BACKWARD = 2, 4


@dataclass(frozen=True)
class Ceilings:
    """Rates of a device by kind of work, in FLOP/s and bytes/s; None where too little is known."""

    low_flops: float | None  # 16-bit operands
    tf32_flops: float | None
    fp32_flops: float | None  # TF32 off
    bytes_per_second: float | None
    source: str

    def flops(self, mode: str) -> float | None:
        """Return the rate of work in `mode`: fp16, bf16, tf32 or fp32."""
        return {"tf32": self.tf32_flops, "fp32": self.fp32_flops}.get(mode, self.low_flops)


UNKNOWN = Ceilings(None, None, None, None, "nothing is known of this device")


def ceilings(device: torch.device) -> Ceilings:
    """Return rates that the device cannot exceed, whatever it runs: processors x highest clock x FLOP a clock.

    Bounds, not figures to reach: cards run below their highest clock under load. A rate above one is a broken clock.
    """
    if device.type != "cuda":
        return UNKNOWN
    table = _table()
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    capability = _architecture(properties) if hip else f"{properties.major}.{properties.minor}"
    per_clock = table["flop_per_clock"].get(capability, {})
    clock, clock_source = _clock(device, properties)
    bandwidth = published(properties.name).bytes_per_second if hip else _bandwidth(device, properties)
    rates = {
        kind: per_clock[kind] * properties.multi_processor_count * clock * table["allowance"]
        if kind in per_clock
        else None
        for kind in ("low", "tf32", "fp32")
    }
    return Ceilings(
        rates["low"],
        rates["tf32"],
        rates["fp32"],
        bandwidth and bandwidth * table["allowance"],
        f"{properties.multi_processor_count} processors of {capability} at {clock / GIGA:.3f} GHz ({clock_source})",
    )


def _architecture(properties: Any) -> str:
    """Return the name of an AMD architecture, without the features after it: gfx942 of gfx942:sramecc+:xnack-."""
    return str(getattr(properties, "gcnArchName", "")).split(":")[0]


def _for_desks(name: str) -> bool:
    """Return whether a board boosts as far as power and heat allow, beyond the clock that its driver calls the peak."""
    return re.search(r"GeForce|RTX|GTX|TITAN|Quadro|Radeon", name) is not None


def _clock(device: torch.device, properties: Any) -> tuple[float, str]:
    """Return the highest clock of the processors, in Hz, and where it is from."""
    if not _for_desks(properties.name):
        known = nvml(device)
        if known is not None and (clock := known.clock("SM", highest=True)) is not None:
            return clock, "NVML"
        # In kHz; torch has it from 2.9 on (cudaDeviceProp::clockRate, from CUDA 13 on the attribute of that name).
        if kilohertz := getattr(properties, "clock_rate", None):
            return kilohertz * 1e3, "the device's properties"
    return float(_table()["highest_clock_hz"]), "assumed, above every card's"


def _bandwidth(device: torch.device, properties: Any) -> float | None:
    """Bytes a second between processors and memory: two transfers a clock (cudaDeviceProp::memoryClockRate, kHz)."""
    kilohertz, bits = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    hertz = kilohertz * 1e3 if kilohertz else None
    if not (hertz and bits) and (known := nvml(device)) is not None:
        hertz, bits = known.clock("MEM", highest=True), known.ask("MemoryBusWidth")
    if not (hertz and bits):
        return None
    return float(hertz * bits / 8 * 2 * (_table()["desk_memory_allowance"] if _for_desks(properties.name) else 1))


def published(name: str) -> Ceilings:
    """Return what the maker publishes for the device of that name, to give shares of; UNKNOWN where no row fits."""
    for row in _table()["card"]:
        if any(fnmatchcase(name, pattern) for pattern in row["names"]):
            low, tf32, fp32 = (row[kind] * TERA if kind in row else None for kind in ("low", "tf32", "fp32"))
            return Ceilings(low, tf32, fp32, row["bandwidth"] * GIGA, "the maker's data sheet, dense")
    return UNKNOWN


@functools.cache
def _table() -> dict[str, Any]:
    return read_toml(fixture("peaks.toml"))


def rate(amount: float, seconds: float, ceiling: float | None) -> float:
    """Return FLOP a second; raises BrokenTiming above `ceiling`, which no such device can reach.

    `amount` are those that no algorithm does without, as a convolution may save some of those that define it.
    """
    if not seconds > 0:
        raise BrokenTiming("the work took no time")
    seen = amount / seconds
    if ceiling is not None and seen > ceiling:
        raise BrokenTiming(f"{seen / TERA:.1f} TFLOP/s where the device can do {ceiling / TERA:.1f} at most")
    return seen


def break_even_rows(
    baseline_flops: float, amp_flops: float, bytes_per_second: float, *, scaler: bool = True, training: bool = True
) -> float:
    """Rows of a batch for each weight of a Linear above which AMP is faster than the baseline; inf where it never is.

    What the faster products save for each weight grows with the rows, and what the casts of weight and gradient and
    unscaling cost does not. Rates in FLOP/s, bandwidth in bytes/s; launches cost nothing here, so it is a lower bound.
    """
    saved = 1 / baseline_flops - 1 / amp_flops
    if saved <= 0:
        return math.inf
    moved = _CAST_WEIGHT + (_CAST_GRADIENT + _UNSCALE * scaler) * training
    return moved / bytes_per_second / (saved * (_FORWARD + _BACKWARD * training))
