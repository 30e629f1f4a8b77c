"""Ops that return a copy of a 16-bit tensor with a part from another one, and what a program makes of the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

SIZE = 6
Write: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _places(x: Tensor) -> Tensor:
    return torch.arange(1, SIZE, 2, device=x.device)


def _across(x: Tensor) -> Tensor:
    return _places(x).expand(SIZE, -1)


def _mask(x: Tensor) -> Tensor:
    return torch.arange(SIZE * SIZE, device=x.device).view(SIZE, SIZE) % 5 == 1


_COLUMNS = (SIZE, SIZE // 2)

WRITES: Mapping[str, tuple[Write, tuple[int, ...]]] = {
    "slice_scatter": (lambda x, s: x.slice_scatter(s, 1, 1, SIZE, 2), _COLUMNS),
    "select_scatter": (lambda x, s: x.select_scatter(s, 1, 2), (SIZE,)),
    "diagonal_scatter": (lambda x, s: x.diagonal_scatter(s), (SIZE,)),
    "index_copy": (lambda x, s: x.index_copy(1, _places(x), s), _COLUMNS),
    "index_put": (lambda x, s: x.index_put((_places(x),), s), _COLUMNS[::-1]),
    "scatter": (lambda x, s: x.scatter(1, _across(x), s), _COLUMNS),
    "masked_scatter": (lambda x, s: x.masked_scatter(_mask(x), s), (SIZE, SIZE)),
}
"""Ops by name that put numbers in the place of others, each with the shape of the tensor it takes them from."""

OTHERS: Mapping[str, tuple[Write, tuple[int, ...]]] = {
    "index_add": (lambda x, s: x.index_add(1, _places(x), s), _COLUMNS),
    "index_put, accumulating": (lambda x, s: x.index_put((_places(x),), s, accumulate=True), _COLUMNS[::-1]),
    "as_strided_scatter": (lambda x, s: x.as_strided_scatter(s, (2, 3), (SIZE, 2), 1), (2, 3)),
    "scatter_add": (lambda x, s: x.scatter_add(1, _across(x), s), _COLUMNS),
}
"""Others, whose gradients do not sum to the incoming one: they add, or keep the gradient of what is replaced."""

OPS = {**WRITES, **OTHERS}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "parts": ("slice_scatter", "select_scatter", "diagonal_scatter"),
    "strides": ("as_strided_scatter",),
    "copies": ("index_copy",),
    "indices": ("index_put", "index_add", "index_put, accumulating"),
    "elements": ("scatter", "masked_scatter", "scatter_add"),
}


def _weights(x: Tensor) -> Tensor:
    return (torch.arange(SIZE * SIZE, device=x.device).view(SIZE, SIZE) % 7 + 1).to(x.dtype)


USES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "sum of rows": lambda y: y.sum(1),
    "product": lambda y: y * _weights(y),
}
"""Functions of a copy whose gradient is one number, one number of each row, or small integers, one of each element."""


def gradients(
    names: tuple[str, ...], dtype: torch.dtype, device: torch.device, run: Callable[..., list[Tensor]]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return by op and use the gradients of the tensor that is copied and of that which is written to the copy.

    With them comes the sum of the gradients of the copy.
    """
    leaves = [
        torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
        for name in names
        for _ in USES
        for shape in ((SIZE, SIZE), OPS[name][1])
    ]
    results = run(*leaves)
    found = torch.autograd.grad(results, leaves, [torch.ones_like(one) for one in results])
    pairs = iter(zip(found[::2], found[1::2], strict=True))
    ones = torch.ones(SIZE, SIZE, dtype=torch.float64)
    totals = {use: float(call(ones).sum()) for use, call in USES.items()}
    return {f"{name}: {use}": (*next(pairs), totals[use]) for name in names for use in USES}


def program(names: tuple[str, ...]) -> Callable[..., list[Tensor]]:
    """Return one function of tensors that calls these ops, and each use of each."""

    def run(*leaves: Tensor) -> list[Tensor]:
        pairs = iter(zip(leaves[::2], leaves[1::2], strict=True))
        return [use(OPS[name][0](*next(pairs))) for name in names for use in USES.values()]

    return run
