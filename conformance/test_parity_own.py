"""Parity with fp32 of a model of the user's own."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise

import torch

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target
from conformance.workloads.own import Builder
from conformance.workloads.training import train_step

SETTLING = 16  # halvings from 65536 to 1
SEED_OF_DROPOUT = 1


def _losses(
    target: Target, own: Builder, seed: int, dtype: torch.dtype | None, steps: int
) -> tuple[list[float], list[float]]:
    """Losses of the steps, and the loss scale before the first and after each."""
    work = own.build(target.device, seed).workload()
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)
    losses, scales = [], [scaler.get_scale()]
    for number in range(steps):
        # Both arms draw the same dropout.
        torch.manual_seed(SEED_OF_DROPOUT + number)
        losses.append(
            train_step(work, number, lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)
        )
        scales.append(scaler.get_scale())
    return [loss.item() for loss in losses], scales


@contract("AMP-PARITY-051")
def test_training_stays_finite(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    steps = case.samples(quick=20, standard=100, full=400)
    losses, scales = _losses(target, own, case.seed, amp_dtype, steps)
    if amp_dtype == torch.float16:
        case.history("loss scale", scales)
    infinite = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    case.equal("steps whose loss is not finite", infinite[:5], [])
    skipped = [number for number, (old, new) in enumerate(pairwise(scales)) if new < old]
    settled = next((number for number in range(steps) if number not in skipped), steps)
    case.at_most("steps skipped while the scale settled", settled, SETTLING)
    later = [number for number in skipped if number > settled]
    case.at_most("share of the later steps that were skipped", len(later) / steps, 0.05)


@contract("AMP-PARITY-052")
def test_first_gradients(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    full, low = (_gradients(target, own, case.seed, dtype) for dtype in (None, amp_dtype))
    rows = []
    lost = 0
    for name, wide in full.items():
        narrow = low[name]
        lost += int(((narrow == 0) & (wide != 0)).sum())
        size = float(wide.norm() * narrow.norm())
        if size > 0:
            rows.append((float((wide * narrow).sum()) / size, float(narrow.norm() / wide.norm()), name))
    case.note("entries of the gradients", sum(wide.numel() for wide in full.values()))
    case.note("entries that are zero with AMP and not in fp32", lost)
    for cosine, ratio, name in sorted(rows)[:3]:
        case.note(f"{name.removeprefix('model.')}: cosine, ratio of norms", [cosine, ratio])


def _gradients(target: Target, own: Builder, seed: int, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """First gradients by parameter, unscaled, on the CPU in float64."""
    work = own.build(target.device, seed).workload()
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)
    torch.manual_seed(SEED_OF_DROPOUT)
    inputs, expected = work.batch(0)
    with nullcontext() if dtype is None else target.autocast(dtype):
        loss = work.loss(work.model(inputs), expected)
    scaler.scale(loss).backward()
    if dtype == torch.float16:
        scaler.unscale_(work.optimizer)
    named = work.model.named_parameters()
    return {name: weight.grad.cpu().double() for name, weight in named if weight.grad is not None}
