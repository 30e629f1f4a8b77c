"""Regions, threads and comparisons of the autocast state that several checks of regions share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...oracles.policy.devices import device_types
from ...oracles.region.stack_model import (
    DEVICE_TYPES,
    State,
    observe,
    product_in,
    telling_product,
)

Result = TypeVar("Result")
DEVICES = {device.type: device for device in device_types()}
DEFAULTS = {name: DEVICES[name].dtype or torch.float32 for name in DEVICE_TYPES}
OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
# Long enough that only a thread that died is given up on.
PATIENCE = 60.0


class Interruption(Exception):
    """Leaves a region early."""


def runs_in(case: Case, what: str, target: Target, dtype: torch.dtype) -> None:
    """A product of float32 tensors has the dtype and the digits of arithmetic in `dtype`."""
    case.identical(f"{what}: a product of float32 tensors", telling_product(target.device), product_in(dtype))


def is_in_force(case: Case, what: str, promised: State) -> None:
    """Every getter of torch says `promised`."""
    case.equal(f"{what}: autocast state that differs", observe().differences(promised), [])


def in_new_thread(call: Callable[[], Result]) -> Result:
    """Return what `call` returns in a thread of its own."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result(timeout=PATIENCE)


def neighbour(target: Target) -> str:
    """Return a device type that is not the target's and whose regions torch opens without the hardware."""
    return "cpu" if target.device_type == "xpu" else "xpu"


def region(target: Target, dtype: torch.dtype | None = None, **options: bool) -> torch.autocast:
    return torch.autocast(target.device_type, dtype=dtype, **options)
