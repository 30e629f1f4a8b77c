"""Provide regions, threads and comparisons of the autocast state for several checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from ...oracles.policy.devices import device_types
from ...oracles.region.stack_model import (
    DEVICE_TYPES,
    Region,
    State,
    observe,
    probe_product,
    product_in,
)

Result = TypeVar("Result")
DEVICES = {device.type: device for device in device_types()}
DEFAULTS = {name: DEVICES[name].dtype or torch.float32 for name in DEVICE_TYPES}
# Seconds after which a thread is considered dead.
PATIENCE = 60.0


class Interruption(Exception):
    """Raised to leave a region early."""


def runs_in(case: Case, what: str, target: Target, dtype: torch.dtype) -> None:
    """Check that a product of float32 tensors has the dtype and the bits of arithmetic in `dtype`."""
    case.identical(f"{what}: a product of float32 tensors", probe_product(target.device), product_in(dtype))


def is_in_force(case: Case, what: str, promised: State) -> None:
    """Check that every getter of torch returns the state `promised`."""
    case.equal(f"{what}: autocast state that differs", observe().differences(promised), [])


def cuda_is_there(_: None) -> str | None:
    """Return a reason where the machine has CUDA or torch_xla, else None."""
    if torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is not None:
        return "CUDA, or torch_xla in its place, is available; this is about machines without"
    return None


def in_new_thread(call: Callable[[], Result]) -> Result:
    """Return the result of `call` in a new thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result(timeout=PATIENCE)


def neighbour(target: Target) -> str:
    """Return another device type than the target's, whose regions torch opens without the hardware."""
    return "cpu" if target.device_type == "xpu" else "xpu"


def region(target: Target, dtype: torch.dtype | None = None, **options: bool) -> torch.autocast:
    return torch.autocast(target.device_type, dtype=dtype, **options)


def random_region(target: Target, rng: torch.Generator) -> Region:
    """Return a random region that torch opens here without disabling it."""

    def pick(*choices: Result) -> Result:
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    dtypes = [dtype for dtype in OTHER if target.supports(dtype)]
    kind = pick(target.device_type, target.device_type, neighbour(target))
    dtype = pick(None, *(dtypes if kind == target.device_type else OTHER))
    return Region(kind, dtype, enabled=pick(True, True, False), cache_enabled=pick(None, None, True, False))
