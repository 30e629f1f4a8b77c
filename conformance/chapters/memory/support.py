"""Compare the bytes that a region holds with the prediction, or with manual casts where a kernel has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from ...harness.check import Case
from ...harness.targets import DTYPE_NAMES, Target
from ...measure.storages import (
    LiveStorages,
    PeakStorages,
    SavedForBackward,
    bytes_by_dtype,
    saved_by,
    without_bookkeeping,
    without_masks,
)
from ...oracles.manual_cast import ManualCast
from ...oracles.symbolic.blocks import Block, evaluate, execute, predict, tensors
from .kernel_exceptions import kernel_exceptions
from .step_memory import StepBytes, step_bytes

SCALER_STATE = 16
"""Bytes that a GradScaler may hold: a number and a count, of 8 bytes each; torch's have 4."""

Storages = list[tuple[torch.dtype, int]]
Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def region(target: Target, dtype: torch.dtype | None, cache: bool | None = None) -> AbstractContextManager[None]:
    """Return a region of `dtype`; None: no region."""
    return nullcontext() if dtype is None else target.autocast(dtype, cache_enabled=cache)


def random_states(target: Target, arguments: int) -> int:
    """Return the bytes that a checkpoint may store of random generators: 5056 of the CPU's, and those of the device.

    These, 16 of a GPU's, are stored once for each tensor that the segment is given (get_device_states of
    torch/utils/checkpoint.py).
    """
    own = torch.get_rng_state().nbytes
    if target.device_type == "cpu":
        return own
    read = getattr(torch.get_device_module(target.device_type), "get_rng_state", None)
    return own if read is None else own + arguments * int(read().nbytes)


def sizes(storages: Storages) -> list[str]:
    """Return type and bytes of each storage, in order."""
    return sorted(f"{dtype} {nbytes}" for dtype, nbytes in storages)


def check_saved_storages(
    case: Case,
    target: Target,
    block: Block,
    dtype: torch.dtype | None,
    rng: torch.Generator,
    *,
    cache: bool = True,
    whole: bool = False,
) -> None:
    """Check the storages that `block` saves against the prediction; UNSUPPORTED if a kernel of the device differs.

    `whole`: or if the block does so in fp32, where what one operation gives changes what the next one saves.
    """
    leaves = tensors(block, target.device, rng)
    arm = "fp32" if dtype is None else DTYPE_NAMES[dtype] + ("" if cache else ", no cache")

    words = _kernel_exception(case, target, block, dtype)
    if words or (whole and (words := network_exception(target, block, leaves, masks=True))):
        if dtype is not None:
            case.equal(
                f"{arm}: every storage, as with manual casts",
                sizes(_saved_storages(block, leaves, region(target, dtype, cache))),
                sizes(_saved_storages(block, leaves, ManualCast(target.device_type, cache=cache).region(dtype))),
            )
        case.unsupported(words)
    predicted = [(item.dtype, item.nbytes) for item in predict(block, target.device_type, dtype, cache=cache)]
    seen = without_masks(_saved_storages(block, leaves, region(target, dtype, cache)), predicted)
    case.equal(f"{arm}: bytes by dtype", bytes_by_dtype(seen), bytes_by_dtype(predicted))
    case.equal(f"{arm}: every storage", sizes(seen), sizes(predicted))


def step_as_predicted(
    case: Case, target: Target, block: Block, dtype: torch.dtype | None, rng: torch.Generator, *, cache: bool = True
) -> tuple[StepBytes, StepBytes]:
    """Return the measured bytes of a step of `block` (low and high are its peak) and the predicted ones.

    UNSUPPORTED if a kernel of the device saves other tensors than its rule says, or the block in fp32 than its rules
    say; FAIL if the region then holds more than with the same manual casts.
    """
    leaves = tensors(block, target.device, rng)
    words = _kernel_exception(case, target, block, dtype) or network_exception(target, block, leaves)
    if not words:
        predicted = step_bytes(block, target.device_type, dtype, cache=cache)
        return held(target, block, region(target, dtype, cache), leaves), predicted
    if dtype is not None:
        most = held(target, block, ManualCast(target.device_type, cache=cache).region(dtype), leaves)
        for leaf in leaves.values():
            leaf.grad = None
        seen = held(target, block, region(target, dtype, cache), leaves)
        for where in ("in_region", "after_region", "gradients", "high"):
            what = f"AMP: {where.replace('_', ' ').replace('high', 'peak')}, and with the same manual casts"
            case.at_most(what, getattr(seen, where), getattr(most, where), "bytes")
    case.unsupported(words)
    raise AssertionError("the case has ended")


def scaler_state(target: Target, *, stepped: bool = False) -> int:
    """Return the bytes, SCALER_STATE at most, of a scaler's tensors after scale(), or after a whole iteration."""
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0)
    weight = torch.ones(64, device=target.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with LiveStorages([weight]) as live:
        scaler.scale(weight.sum()).backward()
        if stepped:
            scaler.step(optimizer)
            scaler.update()
        weight.grad = None
        return min(live.live_bytes, SCALER_STATE)


def held(
    target: Target, block: Block, opened: AbstractContextManager[None], leaves: dict[str, torch.Tensor]
) -> StepBytes:
    """Return the bytes that a step holds whose forward pass runs in `opened`; low and high are the peak."""
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
"""The optimizers of `step_memory.UPDATES`."""

SCALARS = 512
"""Bytes that a scaler and an optimizer's counters may take: 256 of the former (AMP-MEMORY-036), 4 for each weight."""


class Training:
    """Whole steps of `block`: forward pass, backward, scaler and optimizer; gradients are dropped at the end.

    The forward pass is in a region; `manual`: with the same casts by themselves.
    """

    def __init__(
        self,
        target: Target,
        block: Block,
        dtype: torch.dtype | None,
        leaves: dict[str, torch.Tensor],
        optimizer: str,
        *,
        manual: bool = False,
    ) -> None:
        self._target, self._block, self._dtype, self._leaves = target, block, dtype, leaves
        self._manual = manual
        self._optimizer = OPTIMIZERS[optimizer]([leaf for leaf in leaves.values() if leaf.requires_grad])
        # With a scale of 1 no first step overflows, which would leave the optimizer without its state.
        self._scaler = torch.amp.GradScaler(target.device_type, init_scale=1.0, enabled=dtype is not None)

    def step(self) -> None:
        """One step."""
        opened = ManualCast(self._target.device_type).region if self._manual else partial(region, self._target)
        with opened(self._dtype):
            loss = execute(self._block, self._leaves)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


def network_exception(target: Target, block: Block, leaves: dict[str, torch.Tensor], *, masks: bool = False) -> str:
    """Describe that `block` saves outside of any region other tensors than its rules say; return nothing otherwise.

    `masks`: a bool mask may stand for a result.
    """
    predicted = [(item.dtype, item.nbytes) for item in predict(block, target.device_type, None)]
    seen = _saved_storages(block, leaves, nullcontext())
    if sizes(without_masks(seen, predicted) if masks else seen) == sizes(predicted):
        return ""
    return f"on {target.probe['name']} the network saves other tensors for backward, without autocast as well"


def _saved_storages(block: Block, leaves: dict[str, torch.Tensor], opened: AbstractContextManager[None]) -> Storages:
    with SavedForBackward(leaves.values()) as saved, opened:
        execute(block, leaves)
    return without_bookkeeping(saved.storages)


def _kernel_exception(case: Case, target: Target, block: Block, dtype: torch.dtype | None) -> str:
    """Describe the first kernel that saves other tensors than its rule says; FAIL if it wastes memory in 16 bits."""
    found = kernel_exceptions(evaluate(block, target.device_type, dtype), target.device, saved_by)
    case.equal(
        "operations that save more than their derivative needs, or save fp32, given 16-bit inputs",
        [exception.op for exception in found if exception.wastes],
        [],
    )
    if not found:
        return ""
    exception = found[0]
    given = "fp32 as well" if exception.dtype is None else f"{DTYPE_NAMES[exception.dtype]} as well, which it is given"
    return f"on {target.probe['name']} {exception.op} saves other tensors for backward, without autocast and in {given}"
