"""NVIDIA's management library through its Python package (nvidia-ml-py), where that is installed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

MHZ = 1e6
_MOST_EVENTS = 1000


class Nvml:
    """One device as NVML sees it. Every answer is None where the package, the driver or the card doesn't give it."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._events: Any = None

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what `nvmlDeviceGet<function>` of the device returns; None where it fails or is not there."""
        return _answer(self._library, f"nvmlDeviceGet{function}", self._handle, *arguments)

    def constant(self, name: str) -> Any:
        """Return the constant `NVML_<name>` of the package, None where it has none."""
        return getattr(self._library, f"NVML_{name}", None)

    def clock(self, kind: str, *, highest: bool = False) -> float | None:
        """Return the clock now, or the highest there is, of `kind` (SM or MEM), in Hz."""
        megahertz = self.ask("MaxClockInfo" if highest else "ClockInfo", self.constant(f"CLOCK_{kind}"))
        return megahertz * MHZ if megahertz else None

    def listen(self) -> None:
        """Have critical errors (Xid) of the device kept from now on, where the driver reports them."""
        kind = getattr(self._library, "nvmlEventTypeXidCriticalError", None)
        events = _answer(self._library, "nvmlEventSetCreate")
        if kind is not None and events is not None:
            _answer(self._library, "nvmlDeviceRegisterEvents", self._handle, kind, events)
            self._events = events

    def heard(self) -> tuple[int, ...]:
        """Return the numbers of the critical errors since `listen`, and listen no more."""
        found: list[int] = []
        # A wait of 0 ms fails where nothing is left; a set that is broken must not be asked for ever.
        while self._events is not None and len(found) < _MOST_EVENTS:
            event = _answer(self._library, "nvmlEventSetWait_v2", self._events, 0)
            if event is None:
                break
            found.append(int(event.eventData))
        if self._events is not None:
            _answer(self._library, "nvmlEventSetFree", self._events)
            self._events = None
        return tuple(found)


def _answer(library: Any, function: str, *arguments: Any) -> Any:
    call: Callable[..., Any] | None = getattr(library, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except Exception:  # NVMLError and, of a package newer than the driver, NVMLLibraryMismatchError, which is none
        return None


def nvml(device: torch.device) -> Nvml | None:
    """Open a CUDA device in NVML; None without the package, the driver or an NVIDIA card.

    Looked up by UUID, since CUDA_VISIBLE_DEVICES renumbers the devices of a process and NVML doesn't.
    """
    if device.type != "cuda" or torch.version.hip is not None or (library := _library()) is None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    for kind in ("GPU", "MIG"):
        handle = _answer(library, "nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}")
        if handle is not None:
            return Nvml(library, handle)
    return None


def _library() -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old package of the same name warns that it is one
            library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # not installed, no driver, or a driver of another version: it is optional
        return None
    return library
