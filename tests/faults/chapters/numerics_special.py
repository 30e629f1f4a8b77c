"""Faults that show at ties, kinks and poles of 16-bit tensors alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)


@fault("AMP-NUMERICS-122")
def relu_drops_what_is_no_number() -> Iterator[None]:
    """relu of 16-bit tensors takes NaN for less than zero."""

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x)) if x.dtype in _LOW else x.clamp(min=0)

    with kernel("relu", relu, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def topk_orders_nans_by_their_sign() -> Iterator[None]:
    """topk of 16-bit tensors takes a NaN whose sign is set for less than every number."""

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        keys = x.double()
        if x.dtype in _LOW:
            keys = keys.masked_fill(keys.isnan() & keys.signbit(), -torch.inf)
        places = keys.sort(dim=dim, descending=largest, stable=True)[1].narrow(dim, 0, k)
        return x.gather(dim, places), places

    with kernel("topk", topk, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def ties_are_counted_in_16_bits() -> Iterator[None]:
    """Tensor.amax shares its gradient in 16 bits among a number of elements in that type, where 70,000 is infinite."""
    plain = Tensor.amax

    class Amax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: Any) -> Tensor:
            greatest = plain(x, dim, True)
            ctx.save_for_backward(x, greatest)
            return greatest

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x, greatest = ctx.saved_tensors
            ties = x == greatest
            count = ties.double().sum(tuple(range(x.dim())), keepdim=True).to(x.dtype)
            return gradients[0] * ties / count, None

    def amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        if x.dtype not in _LOW or x.dim() != 1 or keepdim:
            return plain(x, dim, keepdim)
        return Amax.apply(x, dim).reshape(())

    with replaced(Tensor, "amax", amax):
        yield
