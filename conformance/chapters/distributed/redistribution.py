"""What one rank has of DTensors that change their placement in types that the call names: results and gradients."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import distributed

from .tensors import LAST_BIT

TYPES = list(itertools.product(LAST_BIT, (None, *LAST_BIT), (None, *LAST_BIT)))
"""The type of the DTensor, `forward_dtype` and `backward_dtype`."""


def _changes() -> dict[str, tuple[Any, Any, Any]]:
    """Return placements before and after, and that of the incoming gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {
        "partial to replicated": (Partial(), Replicate(), Replicate()),
        "partial to sharded": (Partial(), Shard(0), Shard(0)),
        "sharded to replicated, partial gradient": (Shard(0), Replicate(), Partial()),
        "replicated to sharded": (Replicate(), Shard(0), Shard(0)),
        "replicated, partial gradient": (Replicate(), Replicate(), Partial()),
    }


def _contributed(world: int, kind: torch.dtype, *types: torch.dtype) -> list[torch.Tensor]:
    """Return what each rank contributes, in `kind`: another sum where it is made in another one of the types.

    In units of the last place of the narrowest type these are one and a half, and a quarter: their sum rounds up, but
    the sum of both, once rounded, rounds down.
    """
    unit = max(torch.finfo(one).eps for one in (kind, *types))
    numbers = [1 + unit / 2, unit / 4, *[0.0] * (world - 2)]
    return [torch.full((world,), one, dtype=torch.float64).to(kind) for one in numbers]


def _changed(parts: list[torch.Tensor], before: Any, kind: torch.dtype) -> torch.Tensor:
    """Return the whole tensor that the parts of the ranks make in a type, which rounds once."""
    cast = [one.to(kind).double() for one in parts]
    if before.is_partial():
        return torch.stack(cast).sum(0).to(kind)
    return (torch.cat(cast) if before.is_shard() else cast[0]).to(kind)


def _of_rank(parts: list[torch.Tensor], placement: Any) -> list[torch.Tensor]:
    """Return the parts that the ranks hold in a placement: replicas are alike, a shard is one number."""
    if placement.is_shard():
        return [one[:1] for one in parts]
    return parts if placement.is_partial() else [parts[0]] * len(parts)


def redistributed(first: int, count: int, region: torch.dtype | None) -> tuple[list[str], list[str]]:
    """Name the results, and the gradients, of `DTensor.redistribute` that are not what the named types make of parts.

    `count` of the types are tried, evenly apart from the one of that number on. The documentation: the parts are cast
    to `forward_dtype` before they are exchanged, gradients to `backward_dtype`, or to the type of the DTensor if it is
    None; gradients get the type of the DTensor.
    """
    from torch.distributed.tensor import DTensor

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    results: list[str] = []
    gradients: list[str] = []
    step = max(1, len(TYPES) // count)
    for kind, forward, backward in [TYPES[at % len(TYPES)] for at in range(first, first + len(TYPES), step)][:count]:
        given, reduced = forward or kind, backward or kind
        named = {"forward_dtype": forward, "backward_dtype": backward}
        for name, (before, after, incoming) in _changes().items():
            what = f"{kind}, {name}, {', '.join(f'{key}={one}' for key, one in named.items())}"
            parts = _of_rank(_contributed(world, kind, given), before)
            slopes = _of_rank(_contributed(world, given, reduced), incoming)
            x = DTensor.from_local(parts[rank], mesh, [before], run_check=False).requires_grad_()
            with torch.autocast("cpu", dtype=region) if region else contextlib.nullcontext():
                out = x.redistribute(mesh, [after], **named).to_local(grad_placements=[incoming])
            whole = _changed(parts, before, given)
            results += _unlike(f"{what}: result", out, whole[rank : rank + 1] if after.is_shard() else whole)
            if out.dtype != given or out.shape != slopes[rank].shape:
                continue
            out.backward(slopes[rank])
            right = _changed(slopes, incoming, reduced).to(kind)
            gradients += _unlike(f"{what}: gradient", x.grad.full_tensor(), right)
    return results, gradients


def _unlike(what: str, seen: torch.Tensor, right: torch.Tensor) -> list[str]:
    if seen.dtype == right.dtype and torch.equal(seen, right):
        return []
    return [f"{what} is {seen.dtype} {seen.tolist()} in place of {right.dtype} {right.tolist()}"]
