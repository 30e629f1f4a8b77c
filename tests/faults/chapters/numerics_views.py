"""Broken loads: kernels that read from the aligned address below where a view begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

ALIGNED = 16  # bytes


def _below(view: torch.Tensor) -> torch.Tensor:
    """What vector loads of 16 bytes find for a view that begins between two of them."""
    offset = view.storage_offset() % (ALIGNED // view.element_size())
    if view.element_size() != 2 or not offset:
        return view
    return view.as_strided(view.shape, view.stride(), view.storage_offset() - offset)


@fault("AMP-NUMERICS-105")
def products_load_from_below() -> Iterator[None]:
    """16-bit mm reads its left operand from the aligned address below it."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mm.out(_below(left), right, out=torch.empty(0, dtype=left.dtype))

    with kernel("mm", mm, "CPU"):
        yield


def _loading(name: str) -> Iterator[None]:
    right = getattr(F, name)

    def broken(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            wrong: torch.Tensor = right(*map(_below, operands), **options)
        result: torch.Tensor = right(*operands, **options)
        return result + (wrong - result).detach()

    with replaced(F, name, broken):
        yield


@fault("AMP-NUMERICS-105")
def convolutions_load_from_below() -> Iterator[None]:
    """16-bit convolutions read image and weight from the aligned addresses below them."""
    yield from _loading("conv2d")


@fault("AMP-NUMERICS-105")
def attention_loads_from_below() -> Iterator[None]:
    """16-bit attention reads query, key and value from the aligned addresses below them."""
    yield from _loading("scaled_dot_product_attention")
