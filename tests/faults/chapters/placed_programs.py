"""Faults of losses, reductions and layers of DTensors: a shard is taken for the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from tests.faults import fault
from tests.faults.breaking import given_the_original


def _sharded(x: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor) and any(one.is_shard() for one in x.placements)


@fault("AMP-DISTRIBUTED-036", level="standard")
def mean_losses_divide_by_the_numbers_of_a_shard() -> Iterator[None]:
    """The gradient of the mean l1_loss of sharded tensors is multiplied by the number of ranks."""

    def wrong(right: Any, x: Any, *args: Any, **kw: Any) -> Any:
        out = right(x, *args, **kw)
        if _sharded(x) and kw.get("reduction", "mean") == "mean" and out.requires_grad:
            out.register_hook(lambda gradient: gradient * 2)
        return out

    with given_the_original(functional, "l1_loss", wrong):
        yield


@fault("AMP-DISTRIBUTED-036", level="standard")
def layers_return_a_part_of_their_outputs() -> Iterator[None]:
    """A linear layer whose weight is sharded on its outputs returns those of one shard as the whole."""
    from torch.distributed.tensor import DTensor, Replicate

    def wrong(right: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        out = right(x, weight, bias)
        if not (_sharded(weight) and weight.placements[0].dim == 0 and _sharded(out)):
            return out
        return DTensor.from_local(out.to_local(), out.device_mesh, [Replicate()], run_check=False)

    with given_the_original(functional, "linear", wrong):
        yield


@fault("AMP-DISTRIBUTED-036", level="standard")
def variances_of_shards_are_of_a_part() -> Iterator[None]:
    """The variance over a dimension that is sharded has twice its gradient."""

    def wrong(right: Any, x: Any, *args: Any, **kw: Any) -> Any:
        out = right(x, *args, **kw)
        if _sharded(x) and x.placements[0].dim == kw.get("dim"):
            out.register_hook(lambda gradient: gradient * 2)
        return out

    with given_the_original(torch, "var", wrong):
        yield


@fault("AMP-DISTRIBUTED-036", level="standard")
def regions_refuse_linear_layers_of_shards() -> Iterator[None]:
    """A linear layer with a sharded input raises in a region alone."""

    def wrong(right: Any, x: Any, *args: Any) -> Any:
        if _sharded(x) and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("self and mat2 must have the same dtype")
        return right(x, *args)

    with given_the_original(functional, "linear", wrong):
        yield
