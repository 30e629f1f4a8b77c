"""List the device types of autocast and their default dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...data import fixture, in_force, read_toml
from .declared import third_party


@dataclass(frozen=True)
class DeviceType:
    """A device type; `dtype` is None where autocast is not available on it."""

    type: str
    dtype: torch.dtype | None
    documented: bool

    def __str__(self) -> str:
        return self.type


def device_types() -> list[DeviceType]:
    """Return the device types of fixtures/autocast_devices.toml that the running torch knows, and a third party's."""
    rows = read_toml(fixture("autocast_devices.toml"))["device"]
    known = [
        DeviceType(row["type"], getattr(torch, row["dtype"]) if "dtype" in row else None, row.get("documented", False))
        for row in rows
        if in_force(torch.__version__, row.get("since"))
    ]
    name = third_party()
    return [*known, DeviceType(name, torch.float16, False)] if name is not None else known
