"""What a region holds for backward, against what paper says, and against the same casts by hand where it cannot say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ...harness.check import Case
from ...harness.targets import DTYPE_NAMES, Target
from ...oracles.manual_cast import ManualCast
from ...oracles.symbolic.blocks import Block, execute, predict, tensors, work_through
from .kernel_exceptions import strays
from .step_memory import StepBytes, step_bytes
from .storages import PeakStorages, SavedForBackward, bytes_by_dtype, kept_by, without_bookkeeping

RANDOM_STATES = 8192
"""Bytes that checkpointing may store of random generators: 5056 of the CPU's (a Mersenne twister), 16 of a GPU's."""

Storages = list[tuple[torch.dtype, int]]
Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def region(target: Target, dtype: torch.dtype | None, cache: bool | None = None) -> AbstractContextManager[None]:
    """A region of `dtype`; None: no region."""
    return nullcontext() if dtype is None else target.autocast(dtype, cache_enabled=cache)


def sizes(storages: Storages) -> list[str]:
    """Type and bytes of each storage, in order."""
    return sorted(f"{dtype} {nbytes}" for dtype, nbytes in storages)


def keeps_what_is_predicted(
    case: Case, target: Target, block: Block, dtype: torch.dtype | None, rng: torch.Generator, *, cache: bool = True
) -> None:
    """Hold the storages that `block` keeps against paper; ends the case where a kernel of the device differs."""
    leaves = tensors(block, target.device, rng)
    arm = "fp32" if dtype is None else DTYPE_NAMES[dtype] + ("" if cache else ", no cache")

    def kept(opened: AbstractContextManager[None]) -> Storages:
        with SavedForBackward(leaves.values()) as saved, opened:
            execute(block, leaves)
        return without_bookkeeping(saved.storages)

    if words := _unforeseen(case, target, block, dtype):
        if dtype is not None:
            case.equal(
                f"{arm}: every storage, as with casts by hand",
                sizes(kept(region(target, dtype, cache))),
                sizes(kept(ManualCast(target.device_type, cache=cache).region(dtype))),
            )
        case.unsupported(words)
    predicted = [(item.dtype, item.nbytes) for item in predict(block, target.device_type, dtype, cache=cache)]
    seen = kept(region(target, dtype, cache))
    case.equal(f"{arm}: bytes by dtype", bytes_by_dtype(seen), bytes_by_dtype(predicted))
    case.equal(f"{arm}: every storage", sizes(seen), sizes(predicted))


def step_as_predicted(
    case: Case, target: Target, block: Block, dtype: torch.dtype | None, rng: torch.Generator, *, cache: bool = True
) -> tuple[StepBytes, StepBytes]:
    """What a step of `block` holds, low and high being its peak, and what is predicted.

    Ends the case where a kernel of the device keeps what no rule knows; fails it where the region holds more than the
    same casts by hand.
    """
    leaves = tensors(block, target.device, rng)
    if not (words := _unforeseen(case, target, block, dtype)):
        predicted = step_bytes(block, target.device_type, dtype, cache=cache)
        return held(target, block, region(target, dtype, cache), leaves), predicted
    if dtype is not None:
        most = held(target, block, ManualCast(target.device_type, cache=cache).region(dtype), leaves)
        for leaf in leaves.values():
            leaf.grad = None
        seen = held(target, block, region(target, dtype, cache), leaves)
        for where in ("in_region", "after_region", "gradients", "high"):
            what = f"AMP: {where.replace('_', ' ').replace('high', 'peak')}, and with the same casts by hand"
            case.at_most(what, getattr(seen, where), getattr(most, where), "bytes")
    case.unsupported(words)
    raise AssertionError("the case has ended")


def held(
    target: Target, block: Block, opened: AbstractContextManager[None], leaves: dict[str, torch.Tensor]
) -> StepBytes:
    """The bytes that a step holds whose forward pass runs in `opened`; low and high are the peak."""
    with PeakStorages(leaves.values()) as live:
        with opened:
            loss = execute(block, leaves)
            in_region = live.counted_bytes
        after_region = live.counted_bytes
        loss.backward()
        target.synchronize()
        del loss
        gradients = live.counted_bytes
    return StepBytes(in_region, after_region, gradients, live.peak_bytes, live.peak_bytes)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, foreach=False),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, foreach=False),
}
"""The optimizers of `oracles.step_bytes.UPDATES`."""

SCALARS = 512
"""Bytes that a scaler and an optimizer's counters may take: 256 of the former (AMP-MEMORY-036), 4 for each weight."""


class Training:
    """Whole steps of `block`: forward pass, backward, scaler and optimizer; gradients are dropped at the end."""

    def __init__(
        self, target: Target, block: Block, dtype: torch.dtype | None, leaves: dict[str, torch.Tensor], optimizer: str
    ) -> None:
        self._target, self._block, self._dtype, self._leaves = target, block, dtype, leaves
        self._optimizer = OPTIMIZERS[optimizer]([leaf for leaf in leaves.values() if leaf.requires_grad])
        # With a scale of 1 no first step overflows, which would leave the optimizer without its state.
        self._scaler = torch.amp.GradScaler(target.device_type, init_scale=1.0, enabled=dtype is not None)

    def step(self) -> None:
        """One step."""
        with region(self._target, self._dtype):
            loss = execute(self._block, self._leaves)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


def _unforeseen(case: Case, target: Target, block: Block, dtype: torch.dtype | None) -> str:
    """Say which kernel keeps what its rule does not know, if any; fails the case where it wastes memory in 16 bit."""
    found = strays(work_through(block, target.device_type, dtype), target.device, kept_by)
    case.equal(
        "operations that keep more than their derivative needs, or in fp32, when they are given 16 bit",
        [stray.op for stray in found if stray.wastes],
        [],
    )
    if not found:
        return ""
    stray = found[0]
    given = "fp32 as well" if stray.dtype is None else f"{DTYPE_NAMES[stray.dtype]} as well, which it is given"
    return f"on {target.probe['name']} {stray.op} keeps other tensors for backward, without autocast and in {given}"
