"""Reductions that pick an element of rows which are computed in 16 bits, and which a program uses twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

ROWS, COLUMNS = 6, 8
PICKED = 0.5

EXTREMA: Mapping[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(1),
    "max of all": lambda h: h.max(),
    "amin": lambda h: h.amin(1),
    "min of all": lambda h: h.min(),
    "max": lambda h: h.max(1).values,
    "largest absolute value": lambda h: torch.linalg.vector_norm(h, math.inf, 1),
    "smallest absolute value": lambda h: torch.linalg.vector_norm(h, -math.inf, 1),
    "largest absolute value of all": lambda h: h.norm(math.inf),
    "median": lambda h: h.median(1).values,
    "median of all": lambda h: h.median(),
    "scatter_reduce": lambda h: h.new_zeros(ROWS, 1).scatter_reduce(1, _first(h), h, "amax", include_self=False)[:, 0],
}
"""Functions of a matrix that return an element of it, or one of each row."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "few": ("amax", "max of all"),
    "picked": ("max", "median"),
    "rows": ("amin", "scatter_reduce"),
    "norms": ("largest absolute value", "smallest absolute value", "largest absolute value of all"),
    "all": ("min of all", "median of all"),
}

ROUNDINGS = 16
"""Roundings to 16 bits on the way to one gradient: eight operations of `program`, each forward and backward."""


def _first(h: Tensor) -> Tensor:
    return torch.zeros(h.shape, dtype=torch.long, device=h.device)


def matrix(device: torch.device, generator: torch.Generator) -> Tensor:
    """Return rows of the integers from 1 on in random order, each row shifted, no two alike, half of them negative."""
    found = 1 + torch.stack([torch.randperm(COLUMNS, generator=generator) for _ in range(ROWS)])
    return (found + COLUMNS * torch.arange(ROWS)[:, None]).mul(1 - 2 * (found % 2)).float().to(device)


def _computed(x: Tensor) -> Tensor:
    h = x * 1.1
    return h + h * 0.3


def _plus(h: Tensor, picked: Tensor) -> Tensor:
    return h + (picked if picked.dim() == 0 else picked[:, None]).expand(ROWS, COLUMNS) * PICKED


def program(names: tuple[str, ...], region: torch.dtype | None = None) -> Callable[..., list[Tensor]]:
    """Return a function of one matrix for each name: of products and sums of it, plus a part of what is picked of them.

    In a region of a type the product with the identity matrix comes first, which has that type.
    """

    def run(*leaves: Tensor) -> list[Tensor]:
        matrices = [_computed(x) for x in leaves]
        return [_plus(h, EXTREMA[name](h)) for h, name in zip(matrices, names, strict=True)]

    def inside(*leaves: Tensor) -> list[Tensor]:
        with torch.autocast(leaves[0].device.type, dtype=region):
            return run(*(x @ torch.eye(COLUMNS, device=x.device) for x in leaves))

    return run if region is None else inside


def gradients(names: tuple[str, ...], x: Tensor, call: Callable[..., list[Tensor]]) -> dict[str, Tensor]:
    """Return by name the gradient of the sum of a result, of the matrix that it is of."""
    leaves = [x.clone().requires_grad_() for _ in names]
    results = call(*leaves)
    found = torch.autograd.grad(results, leaves, [torch.ones_like(one) for one in results])
    return dict(zip(names, found, strict=True))
