"""Changes of the autocast state around a call, for programs that were compiled before them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ...harness.targets import Target
from .observation import Around
from .support import ambient, inner_type


@contextlib.contextmanager
def set_flags(kind: str, dtype: torch.dtype, *, enabled: bool = True) -> Iterator[None]:
    """Switch autocast on or off through torch's setters."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


def changes(target: Target, dtype: torch.dtype) -> dict[str, Around]:
    """Return regions around a call by name; each differs from the one before in one setting."""
    kind = target.device_type
    elsewhere = "cpu" if kind == "xpu" else "xpu"
    other = inner_type(target, dtype)
    of_other = {} if other is dtype else {"a region of the other type": ambient(target, other, cache_enabled=False)}
    return {
        "no region": contextlib.nullcontext,
        "a region": ambient(target, dtype, cache_enabled=False),
        **of_other,
        "a disabled region": ambient(target, other, enabled=False, cache_enabled=False),
        "a region of another device type": lambda: torch.autocast(elsewhere, dtype=torch.bfloat16),
        "a region with the cache on": ambient(target, dtype, cache_enabled=True),
        "flags that were set": lambda: set_flags(kind, dtype),
    }
