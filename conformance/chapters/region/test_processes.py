"""Check the autocast state of child processes and data-loader workers, and a renamed PrivateUse1 backend."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.children import started
from ...oracles.policy.devices import device_types
from ...oracles.region.stack_model import DEVICE_TYPES, State, fresh, observe, probe_product, product_in
from .child_process import BACKEND, send_everything, send_state

# Seconds after which a process is considered dead.
PATIENCE = 120.0
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()
DEFAULTS = {device.type: device.dtype or torch.float32 for device in device_types() if device.type in DEVICE_TYPES}


@functools.cache
def spawned() -> tuple[State, torch.dtype | None, dict[str, Any]]:
    """Return the report of a process spawned inside a region: one for all checks, since it imports torch again."""
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        said: tuple[State, torch.dtype | None, dict[str, Any]] = started("spawn", send_everything, PATIENCE)
    return said


@contract("AMP-REGION-043")
@pytest.mark.parametrize("method", [deep("standard", "spawn")])
def test_spawned_process(case: Case, method: str) -> None:
    state, product, _ = spawned()
    # The child does not import what registers a third party's device, whose type it then does not know.
    known = {name: dtype for name, dtype in DEFAULTS.items() if name in state.settings}
    case.note("device types that the child does not know", sorted(DEFAULTS.keys() - known.keys()))
    case.equal("state that differs in the child", state.differences(fresh(known)), [])
    case.equal("type of a product of float32 tensors in the child", product, torch.float32)


class Samples(Dataset[tuple[torch.Tensor, State]]):
    """A dataset of products, in a region of `dtype` if given, and of the state before it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, State]:
        before = observe()
        with contextlib.nullcontext() if self.dtype is None else torch.autocast("cpu", dtype=self.dtype):
            return probe_product("cpu"), before


def loader(case: Case, dtype: torch.dtype | None, workers: int) -> Iterable[tuple[torch.Tensor, State]]:
    """Yield a loader of single samples, whose workers have started."""
    if workers and not CAN_FORK:
        case.untestable("workers cannot be forked here, and spawned ones import torch anew")
    return iter(DataLoader(Samples(dtype), batch_size=None, num_workers=workers))


@contract("AMP-REGION-044", on="cpu")
@pytest.mark.parametrize("workers", [0, deep("standard", 1)])
def test_region_in_a_worker(case: Case, target: Target, amp_dtype: torch.dtype, workers: int) -> None:
    before = observe()
    for number, (product, state) in enumerate(loader(case, amp_dtype, workers)):
        case.equal(f"state that differs before the region of sample {number}", state.differences(fresh(DEFAULTS)), [])
        case.identical(f"the product of sample {number}", product, product_in(amp_dtype))
        case.equal(f"state that differs in the loop, at sample {number}", observe().differences(before), [])
    case.identical("a product here after the loop", probe_product("cpu"), product_in(torch.float32))


@contract("AMP-REGION-044", on="cpu")
@pytest.mark.parametrize("workers", [deep("standard", 1)])
def test_region_around_the_loop(case: Case, target: Target, amp_dtype: torch.dtype, workers: int) -> None:
    outside = loader(case, None, workers)
    with torch.autocast("cpu", dtype=amp_dtype):
        inside = observe()
        for number, (product, state) in enumerate(outside):
            case.identical(f"product {number} of a worker started outside", product, product_in(torch.float32))
            case.equal(f"state {number} of that worker", state.differences(fresh(DEFAULTS)), [])
            case.equal(f"state that differs in the loop, at sample {number}", observe().differences(inside), [])
        product, state = next(iter(loader(case, None, 0)))
        case.identical("product with no worker (control)", product, product_in(amp_dtype))


@contract("AMP-REGION-072", on="cpu")
def test_forked_process(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    if not CAN_FORK:
        case.untestable("this system cannot fork")
    with torch.autocast("cpu", dtype=amp_dtype):
        state: State = started("fork", send_state, PATIENCE)
    case.note("a process forked inside a region starts with autocast on", state.settings["cpu"].enabled)
    case.note("open regions that it counts", state.depth)
    case.equal("state that differs here", observe().differences(fresh(DEFAULTS)), [])


@contract("AMP-REGION-064")
@pytest.mark.parametrize("method", [deep("standard", "spawn")])
def test_backend_with_a_name(case: Case, method: str) -> None:
    story = spawned()[2]
    for when in ("without a module", "without the function"):
        kind, message = story[when]
        case.equal(f"error {when}", kind, "AssertionError")
        words = [
            word for word in (BACKEND, "get_amp_supported_dtype", "_register_device_module") if word not in message
        ]
        case.equal(f"what the message {when} does not name", words, [])
    for dtype in (torch.bfloat16, torch.float64):
        case.equal(f"a region of {dtype}, which the backend supports", story[str(dtype)], (True, dtype, []))
    enabled, _, messages = story[str(torch.float16)]
    case.equal("enabled in a region of a dtype that it lacks", enabled, False)
    names = [name for name in (BACKEND, "torch.bfloat16", "torch.float64") if not any(name in one for one in messages)]
    case.equal("what no warning names", names, [])
    case.equal("enabled after the regions", story["after the regions"], False)
