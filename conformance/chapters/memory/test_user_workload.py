"""Check the memory of training a user's model."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract, trains
from ...harness.targets import Target, device_module
from ...measure.allocator import Allocator, peak_above_start
from ...measure.storages import LiveStorages, SavedForBackward, bytes_by_dtype
from ...workloads.training import train_step
from ...workloads.user_workload import Builder, Own


def _growth(target: Target, own: Builder, seed: int, dtype: torch.dtype | None, batches: int) -> int:
    """Return the growth of live bytes from the second to the third pass; the first makes the optimizer's state."""
    built = own.build(target.device, seed)
    work = built.workload()
    # A scale of 1: a step that is skipped at first makes the optimizer's state later.
    scaler = built.scaler(dtype, init_scale=1.0)
    alive = []
    with LiveStorages() as live:
        for _ in range(3):
            for number in range(batches):
                train_step(work, number, lambda: built.region(dtype), scaler)
            alive.append(live.live_bytes)
    return alive[2] - alive[1]


@contract("AMP-MEMORY-020")
@trains(fewest=6, quick=18, standard=48, full=384)
def test_steps_leave_nothing_alive(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    paces = [own.paces[target.device, dtype] for dtype in (amp_dtype, None)]
    most = min(own.tried[target.device], case.samples(quick=3, standard=8, full=64))
    fitting = (batches for batches in range(most, 0, -1) if sum(p.run(3 * batches) for p in paces) < case.allowance)
    batches = next(fitting, 0)
    if not batches:
        case.out_of_time("three passes over one batch in both precisions", sum(pace.run(3) for pace in paces))
    case.note("batches of a pass", batches)
    low, full = (_growth(target, own, case.seed, dtype, batches) for dtype in (amp_dtype, None))
    case.at_most(
        "bytes that a further pass over the batches leaves alive with AMP, beyond fp32", low - full, 0, "bytes"
    )
    if full > 0:
        case.inconclusive(f"a further pass leaves {full} bytes alive in fp32 too: the model or its loss keeps them")


@contract("AMP-MEMORY-021")
@trains(fewest=4, quick=4, standard=4, full=4)
def test_what_is_kept_for_backward(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    for name, dtype in (("fp32", None), ("AMP", amp_dtype)):
        built = own.build(target.device, case.seed)
        work = built.workload()
        inputs, expected = work.batch(0)
        batch = [leaf for leaf in tree_leaves((inputs, expected)) if isinstance(leaf, torch.Tensor)]
        held = [*work.model.parameters(), *work.model.buffers(), *batch]
        with SavedForBackward(held) as saved, built.region(dtype):
            loss = work.loss(work.model(inputs), expected)
        for dtype_name, nbytes in bytes_by_dtype(saved.storages).items():
            case.note(f"{name}: saved for backward in {dtype_name}", nbytes, "bytes")
        case.note(f"{name}: saved for backward in all", saved.total, "bytes")
        del loss
        if (peak := _peak(target, own.build(target.device, case.seed), dtype)) is not None:
            case.note(f"{name}: peak of a step above its start", peak, "bytes")


def _peak(target: Target, built: Own, dtype: torch.dtype | None) -> int | None:
    """Return the peak of allocated bytes of a step above its start; None where the device does not count them."""
    allocator = Allocator.of(device_module(target.device_type), target.device)
    if target.device_type == "cpu" or allocator is None or not allocator.counts_peaks or allocator.lacking:
        return None
    work, scaler = built.workload(), built.scaler(dtype)

    def step() -> None:
        train_step(work, 0, lambda: built.region(dtype), scaler)

    return peak_above_start(allocator, step, work.model.parameters())
