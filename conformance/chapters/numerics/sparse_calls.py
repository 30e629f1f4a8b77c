"""Calls of sparse matrices whose results every type holds, by name, and the layouts in which the matrices are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ...oracles.relations.layouts import SPARSE, repeated

Call: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _reversed(x: Tensor) -> Tensor:
    """Return a COO tensor whose entries are not in the order of their indices."""
    once = x.to_sparse_coo().coalesce()
    return torch.sparse_coo_tensor(once.indices().flip(1), once.values().flip(0), x.shape)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **SPARSE,
    "coo of repeated entries": repeated,
    "coo in another order": _reversed,
    "coo of rows": lambda x: x.to_sparse(1),
}

CALLS: Mapping[str, Call] = {
    "torch.mm": torch.mm,
    "torch.sparse.mm": torch.sparse.mm,
    "operator": lambda s, d: s @ d,
    "dense by sparse": lambda s, d: d.t() @ s.t(),
    "mv": lambda s, d: torch.mv(s, d[:, 0]),
    "addmm": lambda s, d: torch.addmm(d.new_ones(s.shape[0], d.shape[1]), s, d, beta=2, alpha=-1),
    "torch.sparse.addmm": lambda s, d: torch.sparse.addmm(d.new_ones(s.shape[0], d.shape[1]), s, d),
    "bmm": lambda s, d: torch.bmm(torch.stack([s, s]), torch.stack([d, -d])),
    "linear": lambda s, d: torch.nn.functional.linear(d.t().contiguous(), s),
    "sum": lambda s, d: s.sum(),
    "sum of rows": lambda s, d: torch.sparse.sum(s, 1) if s.layout is not torch.strided else s.sum(1),
    "sum of two": lambda s, d: s + s,
    "sum with a dense one": lambda s, d: d.new_ones(s.shape) + s,
    "times a number": lambda s, d: s * -2.0,
    "times itself": lambda s, d: s * s,
    "transposed": lambda s, d: s.t(),
    "cat": lambda s, d: torch.cat([s, s]),
    "rows": lambda s, d: s.index_select(0, torch.tensor([3, 0, 3], device=s.device)),
    "absolute values": lambda s, d: s.abs(),
    "to_dense": lambda s, d: s.to_dense() if s.layout is not torch.strided else s.clone(),
}
"""By name a call of a sparse matrix, or the dense one of the same numbers, and a dense matrix."""


def matrices(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return matrices of integers from -2 to 2, the first with zeros and an empty row, whose products are exact."""
    first, second = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((8, 6), (6, 4)))
    first[torch.rand(first.shape, generator=generator) < 0.4] = 0
    first[2], first[3, 1], first[0, 0] = 0, 2, 1
    return first, second
