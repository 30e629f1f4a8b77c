"""Check peaks, growth and fragmentation by the device's own counters, and the counters themselves."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from ...harness.check import Case, contract, deep, timed
from ...harness.targets import Target, device_module
from ...measure.allocator import WORKSPACES, Allocator, peak_above_start, workspace
from ...measure.storages import PeakStorages
from ...oracles.symbolic.blocks import Block, blocks, chain, execute, resized, tensors
from ...workloads.mlp import mlp
from ...workloads.training import train_step
from .step_memory import UPDATES, step_bytes, whole_step
from .support import SCALARS, Training, region

BLOCKS = blocks()
# Rows, width and layers of a chain of Linear layers, the smaller first. In the first the peak is at the end of the
# forward pass, and the copies of all weights, or fp32 in place of 16 bit, exceed what the closed form leaves open, at
# the largest size with the most that libraries may take as well; in the second it is where the gradients are.
SIZES = {
    "activations": ((1024, 512, 24), (2048, 1024, 24), (4096, 2048, 24)),
    "weights": ((64, 1024, 4), (256, 4096, 4)),
}
LONGEST = 60.0
"""Seconds that a size may take, by what the one before took: a slow device would need minutes."""
BLOCK_BYTES = 5_000_001  # odd, so that a count rounded up differs from one that is not


@pytest.fixture(autouse=True)
def _collected() -> None:
    """What earlier cases left to the garbage collector must not go while this one counts."""
    gc.collect()


def _allocator(case: Case, target: Target) -> Allocator:
    found = Allocator.of(device_module(target.device_type), target.device)
    if found is None or not found.counts_peaks:
        case.unsupported(f"torch records no peak of allocated bytes on {target.device_type}")
    assert found is not None
    if found.lacking:
        case.unsupported(found.lacking)
    return found


@contract("AMP-MEMORY-019", on="accelerator")
@timed
def test_peak_statistics_count_and_reset(case: Case, target: Target) -> None:
    allocator = _allocator(case, target)
    case.note("bytes are those asked for, not rounded up", allocator.exact)
    allocator.reset()
    start = allocator.in_use()
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=target.device)
    high = BLOCK_BYTES + allocator.slack([BLOCK_BYTES])
    case.between("bytes in use with a block", allocator.in_use() - start, BLOCK_BYTES, high, "bytes")
    del block
    case.equal("bytes in use once it is gone, above the start", allocator.in_use() - start, 0)
    case.between("peak above the start", allocator.peak() - start, BLOCK_BYTES, high, "bytes")
    allocator.reset()
    case.equal("peak above the start, after a reset", allocator.peak() - start, 0)
    small = torch.zeros(BLOCK_BYTES // 4, dtype=torch.uint8, device=target.device)
    high = small.nbytes + allocator.slack([small.nbytes])
    case.between("peak with a smaller block", allocator.peak() - start, small.nbytes, high, "bytes")


@contract("AMP-MEMORY-013", on="accelerator")
@timed
@pytest.mark.parametrize("shape", ["activations", deep("standard", "weights")])
def test_peak_follows_the_closed_form(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, shape: str
) -> None:
    allocator = _allocator(case, target)
    seconds_per_product = 0.0
    for number, (rows, width, layers) in enumerate(SIZES[shape]):
        block, products = chain(rows, width, layers), rows * width**2 * layers
        if products * seconds_per_product > LONGEST:
            case.note("larger sizes are left out", f"{products * seconds_per_product:.0f} s, by what the smaller took")
            return
        started = time.perf_counter()
        if words := _short_of(allocator, target, block):
            if number == 0:
                case.untestable(words)
            case.note("larger sizes are left out", words)
            return
        case.progress(f"peak memory, {rows} x {width} x {layers}")
        peaks = {}
        for arm, dtype in (("fp32", None), ("AMP", amp_dtype)):
            predicted = step_bytes(block, target.device_type, dtype)
            peaks[arm] = _peak(allocator, target, block, dtype, rng)
            allocator.reset()
            case.equal(f"{arm}: peak above what is in use, once it is reset", allocator.peak() - allocator.in_use(), 0)
            high = predicted.high + _workspace(case, allocator, block, dtype) + allocator.slack(_large(layers))
            case.between(f"{arm}, {rows} x {width} x {layers}: peak", peaks[arm], predicted.low, high, "bytes")
        case.note("bytes that AMP saves at the peak", peaks["fp32"] - peaks["AMP"], "bytes")
        seconds_per_product = (time.perf_counter() - started) / products


@contract("AMP-MEMORY-013", on="accelerator")
@timed
@pytest.mark.parametrize("optimizer", ["adam", deep("standard", "momentum")])
def test_peak_with_an_optimizer_follows_the_closed_form(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, optimizer: str
) -> None:
    allocator, block = _allocator(case, target), chain(256, 1024, 8)
    if words := _short_of(allocator, target, block):
        case.untestable(words)
    case.progress(f"peak memory with {optimizer}")
    for arm, dtype in (("fp32", None), ("AMP", amp_dtype)):
        predicted = whole_step(block, target.device_type, dtype, UPDATES[optimizer])
        leaves = tensors(block, target.device, rng)
        workspace = _workspace(case, allocator, block, dtype)
        Training(target, block, dtype, leaves, optimizer).step()  # libraries make what they keep
        gc.collect()
        start = allocator.in_use()
        training = Training(target, block, dtype, leaves, optimizer)
        training.step()
        most = predicted.state + SCALARS + allocator.slack(_large(2 * len(block.parameters)))
        case.between(f"{arm}: the optimizer's state", allocator.in_use() - start, predicted.state, most, "bytes")
        allocator.reset()
        training.step()
        low, high = predicted.state + predicted.low, most + predicted.high + workspace
        case.between(f"{arm}: peak of a second step", allocator.peak() - start, low, high, "bytes")
        del training


def _workspace(case: Case, allocator: Allocator, block: Block, dtype: torch.dtype | None) -> int:
    """Bytes that a library takes for the products of a chain, outside of any region; at most what it may take."""
    rows, width = block.inputs["x"]
    x, w = (torch.ones(size, width, dtype=dtype or torch.float32, device=allocator.device) for size in (rows, width))
    taken = max(workspace(allocator, left, right) for left, right in ((x, w.t()), (x, w), (x.t(), x)))
    case.note(f"bytes that a product takes in addition to its tensors, {rows} x {width}", taken, "bytes")
    return min(taken, WORKSPACES)


def _short_of(allocator: Allocator, target: Target, block: Block) -> str | None:
    """Say how much memory a step of `block` needs and how much is free, where that is too little."""
    weights = sum(4 * torch.Size(shape).numel() for shape in (*block.parameters.values(), *block.inputs.values()))
    most = max(step_bytes(block, target.device_type, dtype).high for dtype in (None, torch.float16))
    # With Adam two moments more.
    needed = 3 * weights + most + 2 * WORKSPACES
    free = allocator.free()
    if free is None or free >= needed:
        return None
    size = " x ".join(map(str, block.inputs["x"]))
    return f"{block.name} of {size} with {len(block.parameters)} parameters needs {needed} bytes, {free} are free"


def _large(layers: int) -> list[int]:
    """As many storages as are alive at once: for each layer an activation, a copy and a gradient, some in flight."""
    return [1 << 20] * (3 * layers + 8)


def _peak(allocator: Allocator, target: Target, block: Block, dtype: torch.dtype | None, rng: torch.Generator) -> int:
    leaves = tensors(block, target.device, rng)

    def step() -> None:
        with region(target, dtype):
            loss = execute(block, leaves)
        loss.backward()

    return peak_above_start(allocator, step, leaves.values())


# Networks at the size of real ones: batch and image, or batch, length, width and hidden width, for small sizes.
REAL = {
    "residual": resized(BLOCKS["residual"], {2: 32, 8: 64, 16: 64, 32: 128}),
    "transformer": resized(BLOCKS["transformer"], {4: 8, 32: 512, 64: 1024, 256: 4096}),
}


@contract("AMP-MEMORY-039", on="accelerator")
@timed
@pytest.mark.parametrize("model", ["transformer", deep("standard", "residual")])
def test_peak_of_networks(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str) -> None:
    allocator, block = _allocator(case, target), REAL[model]
    if words := _short_of(allocator, target, block):
        case.untestable(words)
    case.progress(f"peak memory, {model}")
    peaks = {}
    for arm, dtype in (("fp32", None), ("AMP", amp_dtype)):
        predicted = step_bytes(block, target.device_type, dtype)
        peaks[arm] = _peak(allocator, target, block, dtype, rng)
        case.note(f"{arm}: peak of a step above its start", peaks[arm], "bytes")
        case.note(
            f"{arm}: at least and at most, without workspaces, by the closed form", [predicted.low, predicted.high]
        )
    case.note("AMP's peak against fp32's", round(peaks["AMP"] / peaks["fp32"], 4))


@contract("AMP-MEMORY-037", on="accelerator")
@timed
def test_allocator_agrees_with_the_storages(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    allocator = _allocator(case, target)
    block = chain(1024, 1024, 8)
    if words := _short_of(allocator, target, block):
        case.untestable(words)
    leaves = tensors(block, target.device, rng)
    for warm in (True, False):
        for leaf in leaves.values():
            leaf.grad = None
        gc.collect()
        allocator.reset()
        start = allocator.in_use()
        seen: list[tuple[str, int, list[int]]] = []
        with PeakStorages(leaves.values()) as live:
            with target.autocast(amp_dtype):
                loss = execute(block, leaves)
                seen.append(("in the region", allocator.in_use() - start, [size for _, size in live.storages]))
            seen.append(("after the region", allocator.in_use() - start, [size for _, size in live.storages]))
            loss.backward()
            del loss
            seen.append(("after backward", allocator.in_use() - start, [size for _, size in live.storages]))
        if warm:
            continue  # libraries make what they keep in the first run
        for where, counted, storages in seen:
            # A library's own small state may come late: less than one weight's copy, of 2 MiB.
            high = sum(storages) + allocator.slack(storages) + (1 << 20)
            case.between(f"bytes that the allocator counts {where}", counted, sum(storages), high, "bytes")
        case.at_least("the allocator's peak", allocator.peak() - start, live.peak_bytes, "bytes")


@contract("AMP-MEMORY-030", on="accelerator")
@timed
def test_allocator_does_not_grow(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    allocator = Allocator.of(device_module(target.device_type), target.device)
    if allocator is None:
        case.unsupported(f"torch counts no allocated bytes on {target.device_type}")
    assert allocator is not None
    if allocator.lacking:
        case.unsupported(allocator.lacking)
    work = mlp(target.device, rng)
    scaler = torch.amp.GradScaler(target.device_type)
    seen = []
    for step in range(case.samples(quick=8, standard=50, full=200)):
        train_step(work, step, lambda: target.autocast(amp_dtype), scaler)
        work.optimizer.zero_grad(set_to_none=True)
        seen.append(allocator.in_use())
    # The first steps make the optimizer's state and the libraries' workspaces.
    case.equal("growth after each step from the fourth on", [now - seen[3] for now in seen[4:]], [0] * len(seen[4:]))


@contract("AMP-MEMORY-033", on="accelerator")
@timed
def test_fragmentation(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    allocator = _allocator(case, target)
    if not allocator.scatter():
        case.unsupported(f"torch has no allocator statistics on {target.device_type}")
    if words := _short_of(allocator, target, chain(2048, 512, 8)):
        case.untestable(words)
    module = device_module(target.device_type)
    for arm, dtype in (("fp32", None), ("AMP", amp_dtype)):
        empty = getattr(module, "empty_cache", None)
        if empty is not None:
            empty()
        allocator.reset()
        # Batches of changing size leave holes behind.
        for rows in (512, 1024, 768, 2048, 640, 1536):
            _peak(allocator, target, chain(rows, 512, 8), dtype, rng)
        found = allocator.scatter()
        for name, value in found.items():
            case.note(f"{arm}: {name}", value)
        reserved, allocated = (found.get(f"{kind}_bytes.all.peak", 0) for kind in ("reserved", "allocated"))
        if allocated:
            case.note(f"{arm}: reserved against allocated at the peak", round(reserved / allocated, 3))
