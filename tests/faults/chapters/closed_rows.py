"""Faults of attention where a query has no key, and of losses whose sums over many rows are kept in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import given_the_original, kernel

LOW = (torch.float16, torch.bfloat16)


def _closed(mask: Tensor) -> Tensor:
    """Return which queries have no key, as a column."""
    closed = ~mask if mask.dtype is torch.bool else mask == -torch.inf
    return closed.all(-1, keepdim=True)


def _with_closed_rows(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Let `change` make the rows without a key, of the values and the result."""

    def attend(right: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out, mask = right(q, k, v, *args, **kwargs), kwargs.get("attn_mask")
        return out if mask is None else torch.where(_closed(mask), change(v, out), out)

    return given_the_original(F, "scaled_dot_product_attention", attend)


@fault("AMP-NUMERICS-088")
def queries_without_a_key_are_not_numbers() -> Iterator[None]:
    """A query to which every key is closed gets NaNs in every type, as its softmax is (pytorch 103963)."""
    with _with_closed_rows(lambda v, out: torch.full_like(out, torch.nan)):
        yield


@fault("AMP-NUMERICS-088")
def queries_without_a_key_attend_to_all() -> Iterator[None]:
    """A query to which every key is closed gets the mean of all values, as where closed keys have a large logit."""
    with _with_closed_rows(lambda v, out: v.mean(-2, keepdim=True).expand_as(out)):
        yield


@fault("AMP-NUMERICS-125")
def losses_of_many_rows_stop_growing() -> Iterator[None]:
    """nll_loss adds up the rows, and their weights, one by one in the type of the input (pytorch 55657)."""

    def run(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> tuple[Tensor, Tensor]:
        total, weights = torch.empty_like(x[0, 0]), torch.empty_like(x[0, 0])
        torch.ops.aten.nll_loss_forward.output(
            x, target, weight, reduction, ignored, output=total, total_weight=weights
        )
        if x.dtype not in LOW or x.dim() != 2 or reduction == 0 or ignored in target:
            return total, weights
        each = torch.ones_like(x[:, 0]) if weight is None else weight[target]
        # cumsum of 16 bits keeps its sum in float32: each step is rounded here.
        total, weights = torch.zeros_like(x[0, 0]), torch.zeros_like(x[0, 0])
        for loss, one in zip(-x.gather(1, target[:, None])[:, 0] * each, each, strict=True):
            total, weights = total + loss, weights + one
        return (total / weights if reduction == 1 else total), weights

    with kernel("nll_loss_forward", run, "CPU"):
        yield
