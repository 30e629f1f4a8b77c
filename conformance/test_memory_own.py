"""Memory that training a model of the user's own takes."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils._pytree import tree_leaves

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target, device_module
from conformance.measure.memory import LiveStorages, SavedForBackward, bytes_by_dtype, counts_peaks, peak_above_start
from conformance.workloads.own import Builder
from conformance.workloads.training import Workload, train_step


def _step(target: Target, work: Workload, dtype: torch.dtype | None, number: int, scaler: torch.amp.GradScaler) -> None:
    train_step(work, number, lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)


def _growth(case: Case, target: Target, own: Builder, dtype: torch.dtype | None) -> list[int]:
    """Bytes alive after each step, less those after the second; the first two make state and workspaces."""
    work = own.build(target.device, case.seed).workload()
    # A scale of 1: a step that is skipped at first makes the optimizer's state later.
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1.0, enabled=dtype == torch.float16)
    alive = []
    with LiveStorages() as live:
        for number in range(case.samples(quick=6, standard=12, full=50)):
            _step(target, work, dtype, number, scaler)
            alive.append(live.live_bytes)
    return [now - alive[1] for now in alive[2:]]


@contract("AMP-MEMORY-020")
def test_steps_leave_nothing_alive(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    low, full = (_growth(case, target, own, dtype) for dtype in (amp_dtype, None))
    case.note("bytes gained over the steps, fp32 (control)", full[-1], "bytes")
    # Against fp32, since an optimizer may keep a history of its own.
    beyond = [amp - fp32 for amp, fp32 in zip(low, full, strict=True)]
    case.equal("bytes that AMP gains beyond fp32, step by step", beyond, [0] * len(beyond))


@contract("AMP-MEMORY-021")
def test_what_is_kept_for_backward(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    for name, dtype in (("fp32", None), ("AMP", amp_dtype)):
        work = own.build(target.device, case.seed).workload()
        inputs, expected = work.batch(0)
        region = nullcontext() if dtype is None else target.autocast(dtype)
        batch = [leaf for leaf in tree_leaves((inputs, expected)) if isinstance(leaf, torch.Tensor)]
        held = [*work.model.parameters(), *work.model.buffers(), *batch]
        with SavedForBackward(held) as saved, region:
            loss = work.loss(work.model(inputs), expected)
        for kind, nbytes in bytes_by_dtype(saved.storages).items():
            case.note(f"{name}: kept for backward in {kind}", nbytes, "bytes")
        case.note(f"{name}: kept for backward in all", saved.total, "bytes")
        del loss
        if (peak := _peak(target, own.build(target.device, case.seed).workload(), dtype)) is not None:
            case.note(f"{name}: peak of a step above its start", peak, "bytes")


def _peak(target: Target, work: Workload, dtype: torch.dtype | None) -> int | None:
    """Peak of allocated bytes of a step above its start; None where the device does not count them."""
    module = device_module(target.device_type)
    if target.device_type == "cpu" or not counts_peaks(module):
        return None
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)

    def step() -> None:
        _step(target, work, dtype, 0, scaler)

    return peak_above_start(module, target.device, step, work.model.parameters())
