"""Kernels whose saved tensors differ from the rules of `oracles.symbolic`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...oracles.symbolic.op_rules import OPS
from ...oracles.symbolic.tensors import Paper, Value

Kept = list[tuple[torch.dtype, int]]
Keeps = Callable[..., Kept]

# Operations of which the CPU has several kernels, which keep different things. Of other devices' kernels less is known.
_KERNELS = ("scaled_dot_product_attention", "dropout", "batch_norm", "layer_norm", "group_norm")
_COMPOSED = 0  # torch.nn.attention.SDPBackend.MATH


@dataclass(frozen=True)
class Stray:
    """An operation that keeps, outside of any region, something else than its rule says.

    `dtype` is the 16-bit type in which alone it does; None where it does in fp32 too. `wastes` says that in 16 bit it
    keeps more bytes, or more in a wider type, than it needs.
    """

    op: str
    dtype: torch.dtype | None
    wastes: bool = False


def strays(paper: Paper, device: torch.device, keeps: Keeps) -> list[Stray]:
    """The operations that paper has seen of which `device` has a kernel that keeps what no rule here knows.

    Each is run outside of any region, on operands of the types that the region would hand it, and on fp32 ones.
    `keeps(run, tensors)` runs it and returns what was kept.
    """
    asked = [call for call in paper.calls if device.type != "cpu" or call[0] in _KERNELS]
    found = (
        _stray(paper.device_type, device, keeps, *call) for call in dict.fromkeys(_hashed(*call) for call in asked)
    )
    return [stray for stray in found if stray is not None]


def _stray(
    device_type: str, device: torch.device, keeps: Keeps, op: str, values: tuple[Value, ...], given: tuple[Any, ...]
) -> Stray | None:
    options = dict(given)
    seen, ruled, operands = _alone(device_type, device, keeps, op, values, options)
    if sorted(map(str, seen)) == sorted(map(str, ruled)):
        return None
    low = next((value.dtype for value in values if value.dtype in (torch.float16, torch.bfloat16)), None)
    if low is None:
        return Stray(op, None)
    full = tuple(replace(value, dtype=torch.float32 if value.dtype == low else value.dtype) for value in values)
    seen_full, ruled_full, _ = _alone(device_type, device, keeps, op, full, options)
    if sorted(map(str, seen_full)) != sorted(map(str, ruled_full)):
        return Stray(op, None)
    # Attention without a fused kernel of that type is composed, in fp32 (aten, _scaled_dot_product_attention_math).
    return Stray(op, low, _more(seen, ruled) and not (op == "scaled_dot_product_attention" and _composed(operands)))


def _alone(
    device_type: str,
    device: torch.device,
    keeps: Keeps,
    op: str,
    values: tuple[Value, ...],
    options: dict[str, int],
) -> tuple[Kept, Kept, list[torch.Tensor]]:
    """What an operation keeps outside of any region, what its rule says, and the operands that it was given."""
    alone = Paper(device_type, None, cache=True)
    leaves = [replace(value, storage=f"x{number}", leaf="input") for number, value in enumerate(values)]
    OPS[op].rule(alone, *leaves, **options)
    operands = [torch.ones(value.shape, dtype=value.dtype, device=device) for value in values]
    for operand, value in zip(operands, values, strict=True):
        operand.requires_grad_(value.grad)
    seen = keeps(functools.partial(OPS[op].run, **options), operands)
    return seen, [(item.dtype, item.nbytes) for item in alone.saved.values()], operands


def _more(seen: Kept, ruled: Kept) -> bool:
    if sum(nbytes for _, nbytes in seen) > sum(nbytes for _, nbytes in ruled):
        return True
    wide = [Counter[torch.dtype](), Counter[torch.dtype]()]
    for count, kept in zip(wide, (seen, ruled), strict=True):
        for dtype, nbytes in kept:
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
