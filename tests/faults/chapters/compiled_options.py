"""Faults of decompositions where an argument is not the default, and of the indices that compiled ops return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import decomposed, edited

aten = torch.ops.aten


def _other(op: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what puts a decomposition in the place of another."""
    return lambda before: op


@fault("AMP-COMPILE-004", level="full")
def exported_huber_loss_has_a_step_unless_delta_is_one() -> Iterator[None]:
    """The linear branch of a huber_loss that torch.export takes apart subtracts half of 1, not half of delta."""
    from torch._decomp import global_decomposition_table

    def huber(x: Tensor, goal: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
        far = (x - goal).abs()
        loss = torch.where(far < delta, 0.5 * far * far, delta * (far - 0.5))
        return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss

    tables = [table for table in global_decomposition_table.values() if aten.huber_loss.default in table]
    before = [table[aten.huber_loss.default] for table in tables]
    for table in tables:
        table[aten.huber_loss.default] = huber
    try:
        yield
    finally:
        for table, one in zip(tables, before, strict=True):
            table[aten.huber_loss.default] = one


@fault("AMP-COMPILE-004", level="standard")
def compiled_elu_has_the_gradient_of_alpha_one() -> Iterator[None]:
    """The gradient of elu below zero, where the compiler takes it apart, has no alpha."""

    def backward(gradient: Tensor, alpha: float, scale: float, inner: float, is_result: bool, x: Tensor) -> Tensor:
        below = gradient * inner * torch.exp(x.float() * inner)
        return torch.where(x > 0, gradient * scale, below).to(x.dtype)

    with decomposed(aten.elu_backward.default, _other(backward)):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_addr_multiplies_its_input_by_alpha() -> Iterator[None]:
    """A decomposed addr multiplies the input by alpha in place of beta."""

    def addr(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return alpha * x + alpha * torch.outer(a, b)

    with decomposed(aten.addr.default, _other(addr)):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_pools_return_the_places_of_transposed_windows() -> Iterator[None]:
    """The offset of a maximum in its window is taken apart into column and row in place of row and column."""
    from torch._inductor import inductor_prims

    with edited(
        inductor_prims._low_memory_max_pool_offsets_to_indices_aten,
        "_flattened_index_to_nd(offsets, kernel_size)",
        "_flattened_index_to_nd(offsets, kernel_size)[::-1]",
    ):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_topk_returns_the_places_of_the_largest() -> Iterator[None]:
    """A decomposed topk takes the largest elements also where the smallest are asked for."""

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Tensor, Tensor]:
        values, places = torch.sort(x, dim=dim, descending=True)
        return values.narrow(dim, 0, k), places.narrow(dim, 0, k)

    with decomposed(aten.topk.default, _other(topk)):
        yield
