"""Open regions with each combination of arguments, and say what torch made of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (
    *(None, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2),
    *(torch.int32, torch.bool, torch.complex64, "float16"),
)
ENABLED = (True, False, 1, 0, None, "False", 0.5)
CACHES = (None, True, False, 1, "no")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one region."""

    device_type: Any
    dtype: Any = None
    enabled: Any = True
    cache_enabled: Any = None

    def __str__(self) -> str:
        return (
            f"autocast({self.device_type!r}, dtype={self.dtype!r}, enabled={self.enabled!r}, "
            f"cache_enabled={self.cache_enabled!r})"
        )


def grid(device_type: Any) -> Iterator[Arguments]:
    """Return every combination of a dtype, an enabled flag and a cache flag, valid and invalid, for a device type."""
    for dtype, enabled, cache_enabled in itertools.product(DTYPES, ENABLED, CACHES):
        yield Arguments(device_type, dtype, enabled, cache_enabled)


def opened(arguments: Arguments) -> str:
    """Open a region, and return "in force", "warns, disabled", "raises" or what is not in force.

    The state inside is read for the type of the device, without an index. The caller restores what torch leaks.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autocast(
                arguments.device_type,
                dtype=arguments.dtype,
                enabled=arguments.enabled,
                cache_enabled=arguments.cache_enabled,
            ):
                wrong = _not_in_force(arguments)
        except (RuntimeError, TypeError, ValueError, AssertionError):
            return "raises"
    if not caught:
        return wrong or "in force"
    return "warns, disabled" if wrong == "autocast is off" else wrong or "warns, in force"


def _not_in_force(arguments: Arguments) -> str | None:
    device_type = torch.device(arguments.device_type).type
    enabled = torch.is_autocast_enabled(device_type)
    if enabled != bool(arguments.enabled):
        return f"autocast is {'on' if enabled else 'off'}"
    dtype = torch.get_autocast_dtype(device_type)
    if enabled and arguments.dtype not in (None, dtype):
        return f"the dtype is {dtype}"
    cached = torch.is_autocast_cache_enabled()
    if arguments.cache_enabled is not None and cached != bool(arguments.cache_enabled):
        return f"the cache is {'on' if cached else 'off'}"
    return None
