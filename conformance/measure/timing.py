"""Rates of operations, and the ceiling that none can exceed."""

from __future__ import annotations

from typing import Any

from conformance.measure.clocks import BrokenTiming


def rate(operations: float, seconds: float, ceiling: float | None) -> float:
    """Operations a second; raises BrokenTiming above `ceiling`, which no such device can reach."""
    if seconds <= 0:
        raise BrokenTiming("the work took no time")
    seen = operations / seconds
    if ceiling is not None and seen > ceiling:
        raise BrokenTiming(f"{seen / 1e12:.1f} TFLOP/s where the device can do {ceiling / 1e12:.1f} at most")
    return seen


def ceiling(capability: str | None, processors: int | None, hertz: float | None, table: dict[str, Any]) -> float | None:
    """Operations a second that a device cannot exceed: processors x clock x FLOP per clock and processor.

    `table` maps compute capabilities to FLOP per clock (fixtures/peaks.toml) and gives the clock to assume where the
    device tells none. None where too little is known for a bound.
    """
    per_clock = table["flop_per_clock"].get(capability)
    if per_clock is None or processors is None:
        return None
    return float(per_clock) * processors * (hertz or table["highest_clock_hz"]) * table["allowance"]
