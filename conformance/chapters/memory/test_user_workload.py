"""Check the memory of training a user's model."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract
from ...harness.targets import Target, device_module
from ...measure.allocator import Allocator, peak_above_start
from ...measure.storages import LiveStorages, SavedForBackward, bytes_by_dtype
from ...workloads.training import Workload, train_step
from ...workloads.user_workload import Builder


def _step(target: Target, work: Workload, dtype: torch.dtype | None, number: int, scaler: torch.amp.GradScaler) -> None:
    train_step(work, number, lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)


def _growth(case: Case, target: Target, own: Builder, dtype: torch.dtype | None) -> int:
    """Return the growth of live bytes from the second to the third pass; the first makes the optimizer's state."""
    work = own.build(target.device, case.seed).workload()
    # A scale of 1: a step that is skipped at first makes the optimizer's state later.
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1.0, enabled=dtype == torch.float16)
    batches = min(len(work.batches), case.samples(quick=3, standard=8, full=64))
    alive = []
    with LiveStorages() as live:
        for _ in range(3):
            for number in range(batches):
                _step(target, work, dtype, number, scaler)
            alive.append(live.live_bytes)
    return alive[2] - alive[1]


@contract("AMP-MEMORY-020")
def test_steps_leave_nothing_alive(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    low, full = (_growth(case, target, own, dtype) for dtype in (amp_dtype, None))
    case.at_most(
        "bytes that a further pass over the batches leaves alive with AMP, beyond fp32", low - full, 0, "bytes"
    )
    if full > 0:
        case.inconclusive(f"a further pass leaves {full} bytes alive in fp32 too: the model or its loss keeps them")


@contract("AMP-MEMORY-021")
def test_what_is_kept_for_backward(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    for name, dtype in (("fp32", None), ("AMP", amp_dtype)):
        work = own.build(target.device, case.seed).workload()
        inputs, expected = work.batch(0)
        region = nullcontext() if dtype is None else target.autocast(dtype)
        batch = [leaf for leaf in tree_leaves((inputs, expected)) if isinstance(leaf, torch.Tensor)]
        held = [*work.model.parameters(), *work.model.buffers(), *batch]
        with SavedForBackward(held) as saved, region:
            loss = work.loss(work.model(inputs), expected)
        for dtype_name, nbytes in bytes_by_dtype(saved.storages).items():
            case.note(f"{name}: saved for backward in {dtype_name}", nbytes, "bytes")
        case.note(f"{name}: saved for backward in all", saved.total, "bytes")
        del loss
        if (peak := _peak(target, own.build(target.device, case.seed).workload(), dtype)) is not None:
            case.note(f"{name}: peak of a step above its start", peak, "bytes")


def _peak(target: Target, work: Workload, dtype: torch.dtype | None) -> int | None:
    """Return the peak of allocated bytes of a step above its start; None where the device does not count them."""
    allocator = Allocator.of(device_module(target.device_type), target.device)
    if target.device_type == "cpu" or allocator is None or not allocator.counts_peaks or allocator.lacking:
        return None
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)

    def step() -> None:
        _step(target, work, dtype, 0, scaler)

    return peak_above_start(allocator, step, work.model.parameters())
