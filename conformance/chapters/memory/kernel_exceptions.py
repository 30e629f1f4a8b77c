"""Kernels whose saved tensors differ from derivatives.yaml, and a manual-autocast baseline for them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...oracles.symbolic.blocks import Block, drop, last_uses
from ...oracles.symbolic.op_rules import OPS
from ...oracles.symbolic.tensors import FP32, KEEP, LOW, SymbolicRegion, Value, policy_of

Storages = list[tuple[torch.dtype, int]]
Measure = Callable[..., Storages]

# Operations of which the CPU has several kernels, which save different tensors. On other devices all are checked.
_KERNELS = ("scaled_dot_product_attention", "dropout", "batch_norm", "layer_norm", "group_norm")
_COMPOSED = 0  # torch.nn.attention.SDPBackend.MATH


@dataclass(frozen=True)
class KernelException:
    """An operation that saves, outside of any region, other tensors than its rule says.

    `dtype` is the 16-bit type in which alone it does; None if it does in fp32 too. `wastes`: in 16 bits it saves more
    bytes, or more in a wider type, than it needs.
    """

    op: str
    dtype: torch.dtype | None
    wastes: bool = False


def kernel_exceptions(region: SymbolicRegion, device: torch.device, saves: Measure) -> list[KernelException]:
    """Return the operations of `region` whose kernel on `device` saves other tensors than their rule says.

    Each is run outside of any region, on operands of the types that the region would pass to it, and on fp32 ones.
    `saves(run, tensors)` runs it and returns what was saved.
    """
    asked = [call for call in region.calls if device.type != "cpu" or call[0] in _KERNELS]
    found = (
        _exception(region.device_type, device, saves, *call) for call in dict.fromkeys(_hashed(*call) for call in asked)
    )
    return [exception for exception in found if exception is not None]


def _exception(
    device_type: str, device: torch.device, saves: Measure, op: str, values: tuple[Value, ...], given: tuple[Any, ...]
) -> KernelException | None:
    options = dict(given)
    seen, ruled, operands = _alone(device_type, device, saves, op, values, options)
    if sorted(map(str, seen)) == sorted(map(str, ruled)):
        return None
    low = next((value.dtype for value in values if value.dtype in (torch.float16, torch.bfloat16)), None)
    if low is None:
        return KernelException(op, None)
    full = tuple(replace(value, dtype=torch.float32 if value.dtype == low else value.dtype) for value in values)
    seen_full, ruled_full, _ = _alone(device_type, device, saves, op, full, options)
    if sorted(map(str, seen_full)) != sorted(map(str, ruled_full)):
        return KernelException(op, None)
    # Attention without a fused kernel of that type is composed, in fp32 (aten, _scaled_dot_product_attention_math).
    return KernelException(
        op, low, _more(seen, ruled) and not (op == "scaled_dot_product_attention" and _composed(operands))
    )


def _alone(
    device_type: str,
    device: torch.device,
    saves: Measure,
    op: str,
    values: tuple[Value, ...],
    options: dict[str, int],
) -> tuple[Storages, Storages, list[torch.Tensor]]:
    """Return what an operation saves outside of any region, what its rule predicts, and its operands."""
    alone = SymbolicRegion(device_type, None, cache=True)
    leaves = [replace(value, storage=f"x{number}", leaf="input") for number, value in enumerate(values)]
    OPS[op].rule(alone, *leaves, **options)
    operands = [torch.ones(value.shape, dtype=value.dtype, device=device) for value in values]
    for operand, value in zip(operands, values, strict=True):
        operand.requires_grad_(value.grad)
    seen = saves(functools.partial(OPS[op].run, **options), operands)
    return seen, [(item.dtype, item.nbytes) for item in alone.saved.values()], operands


def _more(seen: Storages, ruled: Storages) -> bool:
    if sum(nbytes for _, nbytes in seen) > sum(nbytes for _, nbytes in ruled):
        return True
    wide = [Counter[torch.dtype](), Counter[torch.dtype]()]
    for count, saved in zip(wide, (seen, ruled), strict=True):
        for dtype, nbytes in saved:
            count[dtype] += nbytes * (dtype in (torch.float32, torch.float64))
    return bool(+(wide[0] - wide[1]))


def _composed(operands: list[torch.Tensor]) -> bool:
    try:
        return int(torch._fused_sdp_choice(*operands)) == _COMPOSED
    except (RuntimeError, NotImplementedError):  # a device without fused kernels does not choose
        return True


def _hashed(
    op: str, values: tuple[Value, ...], options: dict[str, int]
) -> tuple[str, tuple[Value, ...], tuple[Any, ...]]:
    # The same operation on operands of the same kind is asked once, whatever they are called.
    return op, tuple(replace(value, storage="", leaf="", role="") for value in values), tuple(options.items())


class ManualRegion:
    """The casts of one region, made manually by the op lists and the rule of the weight cache.

    `copies` are those that the region's cache would hold; they are freed when it exits.
    """

    def __init__(self, device_type: str, amp_dtype: torch.dtype, cache: bool) -> None:
        self._device_type, self._amp_dtype, self._cache = device_type, amp_dtype, cache
        self.copies: dict[int, torch.Tensor] = {}

    def execute(self, block: Block, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run `block` on `leaves` outside of any region; return the last step's result."""
        last, values = last_uses(block), dict(leaves)
        for number, step in enumerate(block.steps):
            operands = list(self._arguments(step.op, [values[name] for name in step.inputs]))
            values[step.out] = self._run(step.op, operands, step.options)
            del operands
            drop(values, step.inputs, last, number)
        return values[block.steps[-1].out]

    def _arguments(self, op: str, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        policy = policy_of(op, self._device_type)
        if policy == KEEP:
            return iter(tensors)
        widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        dtype = {LOW: self._amp_dtype, FP32: torch.float32}.get(policy, widest)
        return (self._cast(tensor, dtype) for tensor in tensors)

    def _run(self, op: str, operands: list[torch.Tensor], options: dict[str, int]) -> torch.Tensor:
        if op == "cross_entropy" and policy_of(op, self._device_type) == KEEP:
            # Of its parts nll_loss alone is given fp32, see the rule on region.
            chances = torch.nn.functional.log_softmax(operands[0], -1)
            return torch.nn.functional.nll_loss(self._cast(chances, torch.float32), operands[1])
        result: torch.Tensor = OPS[op].run(*operands, **options)
        return result

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor
        if not (self._cache and tensor.is_leaf and tensor.requires_grad and dtype == self._amp_dtype):
            return tensor.to(dtype)
        return (
            self.copies.setdefault(id(tensor), tensor.to(dtype))
            if id(tensor) not in self.copies
            else self.copies[id(tensor)]
        )
