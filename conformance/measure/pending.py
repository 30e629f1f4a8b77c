"""Operations that a device has recorded and not begun: a lazy one compiles them together when a value is needed."""

from __future__ import annotations

import gc
import sys


def run_pending(device_type: str) -> None:
    """Have a device of this type run all that it has recorded, where it is lazy; on other devices do nothing.

    torch_xla computes a value by a program of all operations that lead to it, compiled for that value alone: without
    a step marker each comparison of two tensors compiles the training that they come from once more.

    Raises what torch_xla raises where a tensor that is recorded cannot be computed; the others are lost with it.
    """
    if device_type == "xla" and (package := sys.modules.get("torch_xla")) is not None:
        package.sync()


def drop_pending(device_type: str) -> None:
    """Free what nothing refers to but itself, where a device is lazy: it would still run with what comes next."""
    if device_type == "xla":
        gc.collect()
