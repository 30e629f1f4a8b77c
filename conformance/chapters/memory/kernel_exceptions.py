"""Kernels whose saved tensors differ from derivatives.yaml."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...measure.storages import without_masks
from ...oracles.symbolic.op_rules import OPS
from ...oracles.symbolic.tensors import SymbolicRegion, Value

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
    if _alike(seen, ruled):
        return None
    low = next((value.dtype for value in values if value.dtype in (torch.float16, torch.bfloat16)), None)
    if low is None:
        return KernelException(op, None)
    full = tuple(replace(value, dtype=torch.float32 if value.dtype == low else value.dtype) for value in values)
    seen_full, ruled_full, _ = _alone(device_type, device, saves, op, full, options)
    if not _alike(seen_full, ruled_full):
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


def _alike(seen: Storages, ruled: Storages) -> bool:
    return sorted(map(str, without_masks(seen, ruled))) == sorted(map(str, ruled))


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
