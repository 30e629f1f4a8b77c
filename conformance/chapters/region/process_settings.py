"""Read the process-wide state other than autocast, from random generators to precision flags (read-only)."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

from ...measure.flags import FLAGS

_PLAIN = (bool, int, float, str, tuple, list, type(None))
# Attributes and functions of torch; those that a version lacks or cannot read are omitted.
_PUBLIC = (
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_anomaly_enabled",
    "is_anomaly_check_nan_enabled",
    "is_warn_always_enabled",
    "get_deterministic_debug_mode",
    "initial_seed",
    "_C._is_multithreading_enabled",
    "_C._is_fwd_grad_enabled",
    "_C._is_view_replay_enabled",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
)


def observe(device: torch.device, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings of this process and thread by name, or some of them, with the generator of `device`."""
    return {name: read() for name, read in _readers(device.type).items() if names is None or name in names}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two observations."""
    return [f"{name}: {before[name]}, then {now[name]}" for name in before if before[name] != now[name]]


def keeps_subnormals() -> bool:
    """Return whether this thread keeps subnormals, by arithmetic: torch.set_flush_denormal has no getter."""
    return bool((torch.tensor([1e-40], dtype=torch.float32, device="cpu") * 1).view(torch.int32).item() != 0)


@functools.cache
def _readers(device_type: str) -> dict[str, Callable[[], Any]]:
    """Return every reader that this torch has."""
    readers: dict[str, Callable[[], Any]] = {
        "torch's random numbers": lambda: _digest(torch.get_rng_state()),
        "Python's random numbers": lambda: hash(random.getstate()),
        "subnormal float32 numbers are kept": keeps_subnormals,
        "device of new tensors": lambda: str(torch.empty(0).device),
        "environment variables": lambda: hash(frozenset(os.environ.items())),  # too long for a report
        "warning filters": lambda: hash(str(warnings.filters)),
        "garbage collection": gc.isenabled,
    }
    if "numpy" in sys.modules:
        generator = sys.modules["numpy"].random.get_state
        readers["NumPy's random numbers"] = lambda: hash(tuple(map(bytes, generator()[1:2])) + generator()[2:])
    module: Any = getattr(torch, device_type, None)  # which a third party may not have registered
    if hasattr(module, "get_rng_state"):
        readers[f"random numbers of {device_type}"] = lambda: _digest(module.get_rng_state())
    paths = (*_PUBLIC, *(flag.name.removeprefix("torch.") for flag in FLAGS))
    readers.update({f"torch.{path}": functools.partial(_value, path) for path in paths})
    # All that torch has both a getter and a setter for: precision flags, preferred libraries, debugging aids.
    pairs = [name for name in dir(torch._C) if name.startswith("_get_") and hasattr(torch._C, f"_set_{name[5:]}")]
    readers.update({f"torch._C.{name}": functools.partial(_value, f"_C.{name}") for name in pairs})
    return {name: read for name, read in readers.items() if _readable(read)}


def _digest(state: torch.Tensor) -> int:
    return hash(bytes(state.tolist()))


def _value(path: str) -> Any:
    try:
        found = functools.reduce(getattr, path.split("."), torch)
        found = found() if callable(found) else found
    except RuntimeError as error:  # a flag of one of two mutually exclusive interfaces after the other was used
        return str(error)
    return found if isinstance(found, _PLAIN) else str(found)


def _readable(read: Callable[[], Any]) -> bool:
    try:
        # A value that differs at each reading is not a setting.
        return bool(read() == read())
    except Exception:  # not of this version, or a getter with arguments
        return False
