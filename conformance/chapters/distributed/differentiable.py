"""What the collectives of torch.distributed.nn give one rank: their results, and the gradients of what it puts in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.distributed.nn import functional

from .tensors import LAST_BIT, contributed

SIZE = 2

Parts: TypeAlias = list[torch.Tensor]
Numbers: TypeAlias = list[float]
Rule: TypeAlias = Callable[[int, list[Numbers], list[Numbers]], tuple[Numbers, Numbers]]
"""Of a rank, and of what each rank puts in and weighs its results with: the results, and the gradients of the inputs.

Every rank puts in a tensor for each rank, or one; it has one weight for each of its results.
"""


def _column(table: Sequence[Numbers], at: int) -> Numbers:
    return [row[at] for row in table]


def _first(parts: Parts) -> torch.Tensor:
    return parts[0]


COLLECTIVES: dict[str, tuple[Callable[[Parts], Any], Callable[[Any], Any], Rule]] = {
    "all_reduce": (
        _first,
        lambda x: functional.all_reduce(x),
        lambda rank, x, w: ([sum(_column(x, 0))], [sum(_column(w, 0))]),
    ),
    "broadcast": (
        _first,
        lambda x: functional.broadcast(x, 0),
        lambda rank, x, w: ([x[0][0]], [sum(_column(w, 0)) if rank == 0 else 0.0]),
    ),
    "all_gather": (
        _first,
        lambda x: functional.all_gather(x),
        lambda rank, x, w: (_column(x, 0), [sum(_column(w, rank))]),
    ),
    "scatter": (
        list,
        lambda x: functional.scatter(x, 0),
        lambda rank, x, w: ([x[0][rank]], _column(w, 0) if rank == 0 else [0.0] * len(x)),
    ),
    "all_to_all": (
        list,
        lambda x: functional.all_to_all([torch.empty_like(one) for one in x], x),
        lambda rank, x, w: (_column(x, rank), _column(w, rank)),
    ),
    "all_to_all_single": (
        torch.stack,
        lambda x: functional.all_to_all_single(torch.empty_like(x), x),
        lambda rank, x, w: (_column(x, rank), _column(w, rank)),
    ),
    "reduce_scatter": (
        list,
        lambda x: functional.reduce_scatter(torch.empty_like(x[0]), x),
        lambda rank, x, w: ([sum(_column(x, rank))], _column(w, 0)),
    ),
}
"""What makes the input of a rank's parts, the collective, and its rule: those whose results every rank has."""


def _table(kind: torch.dtype, world: int, shift: int) -> list[Numbers]:
    """Return a number for each rank and part: the sum over the ranks is below two, and has the last bit of the type."""
    return [[contributed((rank + part + shift) % world, kind) for part in range(world)] for rank in range(world)]


def gradients_of_collectives(region: torch.dtype | None) -> list[str]:
    """Name the results and gradients of collectives, in a region or outside, that are not the exact ones."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for name, (put_in, collective, rule) in COLLECTIVES.items():
        if name == "reduce_scatter" and not _scatters_sums():
            continue
        for kind in LAST_BIT:
            inputs, weights = _table(kind, world, 0), _table(kind, world, 1)
            count = 1 if put_in is _first else world
            parts = [torch.full((SIZE,), one, dtype=kind).requires_grad_() for one in inputs[rank][:count]]
            given = put_in(parts)
            with torch.autocast("cpu", dtype=region) if region else contextlib.nullcontext():
                out = collective(given)
            results = [out] if isinstance(out, torch.Tensor) and out.dim() == 1 else list(out)
            weighted = [one * weight for one, weight in zip(results, weights[rank], strict=False)]
            torch.stack(weighted).sum().backward()
            right, slopes = rule(rank, inputs, weights)
            found += _unlike(f"{name} of {kind}, result", results, right, kind)
            found += _unlike(f"{name} of {kind}, gradient", [one.grad for one in parts], slopes[:count], kind)
    return found


def _scatters_sums() -> bool:
    """Return whether the backend has reduce_scatter: gloo has it from torch 2.7 on."""
    one = torch.ones(1)
    try:
        distributed.reduce_scatter(torch.empty_like(one), [one] * distributed.get_world_size())
    except RuntimeError:
        return False
    return True


def _unlike(what: str, seen: Sequence[Any], expected: Numbers, kind: torch.dtype) -> list[str]:
    if len(seen) != len(expected):
        return [f"{what}: {len(seen)} tensors in place of {len(expected)}"]
    found = []
    for number, (one, right) in enumerate(zip(seen, expected, strict=True)):
        if one is None or one.dtype != kind or one.tolist() != [right] * SIZE:
            got = None if one is None else f"{one.dtype} {one.tolist()}"
            found.append(f"{what} {number}: {got} in place of {right}")
    return found
