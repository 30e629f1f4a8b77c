"""Model autocast's state as a stack of regions, and read torch's getters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from ..policy.declared import third_party

# Every torch since 2.6 keeps an autocast state for these, whether or not the device is there, and for a third party's.
DEVICE_TYPES = tuple(filter(None, ("cpu", "cuda", "xpu", "mps", "hpu", "xla", third_party())))


@dataclass(frozen=True)
class Setting:
    """The autocast setting of one device type."""

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class State:
    """The autocast state of one thread: a setting for each device type, the cache flag and the nesting depth."""

    settings: Mapping[str, Setting]
    cache_enabled: bool
    depth: int

    def differences(self, promised: State) -> list[str]:
        """Return the differences of this state from `promised`, one sentence each."""
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

    def computes_in(self, device_type: str) -> torch.dtype:
        """The type of a product of float32 tensors on a device of that type."""
        setting = self.settings[device_type]
        return setting.dtype if setting.enabled else torch.float32


@dataclass(frozen=True)
class Region:
    """The arguments of `torch.autocast`, with its meaning of None."""

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


@dataclass(frozen=True)
class Entry:
    """The state on entry to a region, which its exit restores."""

    device_type: str
    setting: Setting
    cache_enabled: bool


class RegionStack:
    """Predict the state after entering and leaving regions, from the `torch.autocast` docstring.

    A region sets the flag, the dtype and the cache flag of its device type, where None keeps what is in force;
    leaving it restores the state of its entry. Other device types are not touched. A region of a type
    that autocast lacks is disabled, as is one for a device type that is `absent`; `unrestricted` ones take any type.
    """

    def __init__(
        self, state: State, absent: Collection[str] = frozenset(), unrestricted: Collection[str] = frozenset()
    ) -> None:
        self._state = state
        self._open: list[Entry] = []
        self._absent = absent
        self._unrestricted = unrestricted

    @property
    def state(self) -> State:
        """The state that is in force now."""
        return self._state

    def settled(self, region: Region) -> Region:
        """Return the region with nothing left open, which is what an instance is from when it is made."""
        now = self._state
        dtype = now.settings[region.device_type].dtype if region.dtype is None else region.dtype
        known = dtype in (torch.float16, torch.bfloat16) or region.device_type in self._unrestricted
        enabled = region.enabled and known and region.device_type not in self._absent
        cache_enabled = now.cache_enabled if region.cache_enabled is None else region.cache_enabled
        return Region(region.device_type, dtype, enabled, cache_enabled)

    def enter(self, region: Region) -> Entry:
        """Enter a region; return what `leave` needs where regions are not left in the opposite order."""
        chosen = self.settled(region)
        entry = Entry(region.device_type, self._state.settings[region.device_type], self._state.cache_enabled)
        assert chosen.dtype is not None
        assert chosen.cache_enabled is not None
        self._change({chosen.device_type: Setting(chosen.enabled, chosen.dtype)}, chosen.cache_enabled, 1)
        self._open.append(entry)
        return entry

    def leave(self, entry: Entry | None = None) -> None:
        """Leave the region of `entry`, by default the innermost."""
        entry = self._open[-1] if entry is None else entry
        # By identity: two entries may have found the same.
        self._open = [other for other in self._open if other is not entry]
        self._change({entry.device_type: entry.setting}, entry.cache_enabled, -1)

    def set_enabled(self, device_type: str, enabled: bool) -> None:
        """What `torch.set_autocast_enabled` does."""
        self._change({device_type: replace(self._state.settings[device_type], enabled=enabled)})

    def set_dtype(self, device_type: str, dtype: torch.dtype) -> None:
        """What `torch.set_autocast_dtype` does."""
        self._change({device_type: replace(self._state.settings[device_type], dtype=dtype)})

    def set_cache_enabled(self, enabled: bool) -> None:
        """What `torch.set_autocast_cache_enabled` does."""
        self._change({}, enabled)

    def _change(self, settings: Mapping[str, Setting], cache_enabled: bool | None = None, deeper: int = 0) -> None:
        now = self._state
        self._state = State(
            settings={**now.settings, **settings},
            cache_enabled=now.cache_enabled if cache_enabled is None else cache_enabled,
            depth=now.depth + deeper,
        )


def observe() -> State:
    """Return the state of the calling thread from torch's getters."""
    # torch returns the depth only when it changes.
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


def probe_product(device: torch.device | str) -> torch.Tensor:
    """Return the product of a (2, 1) and a (1, 1) float32 tensor on `device`, whose bits tell its arithmetic."""
    column = torch.tensor(_COLUMN, device=device).reshape(2, 1)
    return torch.mm(column, torch.ones(1, 1, device=device))


def product_in(dtype: torch.dtype) -> torch.Tensor:
    """Return what `probe_product` gives when computed in `dtype`: float32, float16 or bfloat16; shape (2, 1)."""
    return torch.tensor(_PRODUCTS[dtype], dtype=dtype).reshape(2, 1)


def dtype_of_product(product: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that a telling product was computed in, None where its bits match no dtype."""
    column = tuple(product.flatten().tolist())
    return product.dtype if _PRODUCTS.get(product.dtype) == column else None
