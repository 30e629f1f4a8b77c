"""What a release of torch does not have yet, by the suite's tables: autocast of a device type, an optimizer."""

from __future__ import annotations

import functools
import re
from typing import Any

from ..data import fixture, read_toml


def lacks(release: str, value: str) -> str | None:
    """Say that `release` ("2.7") is before what the parameter `value` of a case names, or return None.

    Values are device types (mtia) and optimizers with their variant and implementation (Muon-decay-for-loop). A release
    without a number lacks nothing.
    """
    devices, optimizers = _tables()
    if (since := devices.get(value)) is not None and _before(release, since):
        return f"autocast for {value} begins with {since}"
    name, *form = value.split("-")
    entry = optimizers.get(name, {})
    if (since := entry.get("since")) is not None and _before(release, since):
        return f"{name} begins with {since}"
    if form[-1:] == ["fused"] and (since := entry.get("scales_itself_since")) is not None and _before(release, since):
        return f"fused {name} that unscales by itself begins with {since}"
    return None


@functools.cache
def _tables() -> tuple[dict[str, str | None], dict[str, dict[str, Any]]]:
    devices = read_toml(fixture("autocast_devices.toml"))["device"]
    return {row["type"]: row.get("since") for row in devices}, read_toml(fixture("optimizers.toml"))["optimizer"]


def _before(release: str, since: str) -> bool:
    return bool(numbers := _numbers(release)) and numbers < _numbers(since)


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]
