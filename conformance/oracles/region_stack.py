"""A plain model of autocast's state: a stack of regions, and what torch's own getters say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Every torch since 2.6 keeps an autocast state for these, whether or not the device is there.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla")


@dataclass(frozen=True)
class Setting:
    """What autocast keeps for one device type."""

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class State:
    """The autocast state of one thread: a setting for each device type, the cache flag and the nesting depth."""

    settings: Mapping[str, Setting]
    cache_enabled: bool
    depth: int

    def differences(self, promised: State) -> list[str]:
        """Say in what this state differs from `promised`, a sentence for each; empty where they agree."""
        found = []
        for device_type, setting in promised.settings.items():
            here = self.settings[device_type]
            if here.enabled != setting.enabled:
                found.append(f"enabled for {device_type} is {here.enabled}, not {setting.enabled}")
            if here.dtype != setting.dtype:
                found.append(f"dtype for {device_type} is {here.dtype}, not {setting.dtype}")
        if self.cache_enabled != promised.cache_enabled:
            found.append(f"cache enabled is {self.cache_enabled}, not {promised.cache_enabled}")
        if self.depth != promised.depth:
            found.append(f"nesting depth is {self.depth}, not {promised.depth}")
        return found


@dataclass(frozen=True)
class Region:
    """The arguments of `torch.autocast`; None means what it means there."""

    device_type: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool | None = None

    def open(self) -> torch.autocast:
        """Return the region as torch makes it; its arguments are resolved here, not on entering."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )

    def __str__(self) -> str:
        parts = [self.device_type, "enabled" if self.enabled else "disabled"]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.cache_enabled is not None:
            parts.append(f"cache {'on' if self.cache_enabled else 'off'}")
        return " ".join(parts)


class RegionStack:
    """What the state must be after entering and leaving regions, from the `torch.autocast` docstring.

    A region sets the flag, the dtype and the cache flag of its device type, where None keeps what is in force;
    leaving it puts back what was there when it was entered. Other device types are not touched.
    """

    def __init__(self, state: State) -> None:
        self._states = [state]

    @property
    def state(self) -> State:
        """The state that is in force now."""
        return self._states[-1]

    def enter(self, region: Region) -> None:
        """Enter a region of supported dtype on a device type that autocast does not disable by itself."""
        now = self.state
        dtype = now.settings[region.device_type].dtype if region.dtype is None else region.dtype
        self._states.append(
            State(
                settings={**now.settings, region.device_type: Setting(region.enabled, dtype)},
                cache_enabled=now.cache_enabled if region.cache_enabled is None else region.cache_enabled,
                depth=now.depth + 1,
            )
        )

    def leave(self) -> None:
        """Leave the innermost region."""
        self._states.pop()


def observe() -> State:
    """Return what torch's getters say of the calling thread."""
    # The depth is only told when it is changed.
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    return State(
        settings={
            device_type: Setting(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in DEVICE_TYPES
        },
        cache_enabled=torch.is_autocast_cache_enabled(),
        depth=int(depth),
    )


def fresh(dtypes: Mapping[str, torch.dtype]) -> State:
    """Return the state of a new thread: everything off but the cache, `dtypes` by device type, no region open."""
    return State({name: Setting(False, dtype) for name, dtype in dtypes.items()}, cache_enabled=True, depth=0)


# One column times 1: 2**17 exceeds fp16 and 1 + 2**-10 falls between two neighbours of bf16, while float32, and
# TF32 with its ten fraction bits, hold both. So the product's bits tell in which type it was computed.
_COLUMN = (131072.0, 1.0009765625)
_PRODUCTS = {
    torch.float32: _COLUMN,
    torch.float16: (float("inf"), 1.0009765625),
    torch.bfloat16: (131072.0, 1.0),
}


def telling_product(device: torch.device | str) -> torch.Tensor:
    """Return the product of a (2, 1) and a (1, 1) float32 tensor on `device`, whose bits tell its arithmetic."""
    column = torch.tensor(_COLUMN, device=device).reshape(2, 1)
    return torch.mm(column, torch.ones(1, 1, device=device))


def product_in(dtype: torch.dtype) -> torch.Tensor:
    """Return what `telling_product` gives when computed in `dtype`: float32, float16 or bfloat16; shape (2, 1)."""
    return torch.tensor(_PRODUCTS[dtype], dtype=dtype).reshape(2, 1)
