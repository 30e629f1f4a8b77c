"""Drive any gradient scaler against an independent model of `torch.amp.GradScaler` (public; see docs/scalers.md).

The names are loaded on first use: `conformance.scaler.model` alone needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import CAPABILITIES, Depth, Difference, Driven, Factory, GradScalerModel, Mismatch, drive, machine

__all__ = [
    "CAPABILITIES",
    "Depth",
    "Difference",
    "Driven",
    "Factory",
    "GradScalerModel",
    "Mismatch",
    "drive",
    "machine",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import driver

    return getattr(driver, name)
