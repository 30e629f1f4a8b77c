"""Ops along a dimension or several, whose results do not depend on which ones these are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Along = Callable[[Tensor, int], Tensor]
Over = Callable[[Tensor, tuple[int, ...], bool], Tensor]

SHAPES = ((33,), (34, 9), (6, 34, 5), (2, 8, 5, 34))
"""Even and odd sizes, so that a middle is one element or between two."""

LARGE = (66, 3, 67)
"""Sums over several dimensions of it pass what the types count to: 256 in bf16, 2048 in fp16."""


def _lower_half(x: Tensor, dim: int) -> Tensor:
    """Return the first half of a dimension, which ops that need an index of that size take."""
    return x.narrow(dim, 0, (x.size(dim) + 1) // 2)


def _row(x: Tensor, dim: int) -> Tensor:
    """Return the places along a dimension in another order, each once."""
    count = x.size(dim)
    return (torch.arange(count, device=x.device) * 7 + 3) % count


def _places(x: Tensor, dim: int) -> Tensor:
    """Return for each element another place along the dimension, none twice."""
    return _row(x, dim).expand(x.movedim(dim, -1).shape).movedim(-1, dim)


def _spoiled(x: Tensor) -> Tensor:
    """Return the numbers with a NaN in place of each seventh."""
    return x.masked_fill(x.round() % 7 == 3, torch.nan)


PICKED: Mapping[str, Along] = {
    "median": lambda x, dim: x.median(dim)[0],
    "median, index": lambda x, dim: x.median(dim)[1],
    "nanmedian": lambda x, dim: _spoiled(x).nanmedian(dim)[0],
    "kthvalue": lambda x, dim: x.kthvalue(2, dim)[0],
    "kthvalue, index": lambda x, dim: x.kthvalue(2, dim)[1],
    "max": lambda x, dim: x.max(dim)[0],
    "max, index": lambda x, dim: x.max(dim)[1],
    "min": lambda x, dim: x.min(dim)[0],
    "argmax": lambda x, dim: x.argmax(dim),
    "argmin": lambda x, dim: x.argmin(dim),
}
"""Ops that take the dimension away."""

KEPT: Mapping[str, Along] = {
    "sort": lambda x, dim: x.sort(dim)[0],
    "sort, descending": lambda x, dim: x.sort(dim, descending=True)[0],
    "argsort": lambda x, dim: x.argsort(dim),
    "topk": lambda x, dim: x.topk(2, dim)[0],
    "topk, smallest": lambda x, dim: x.topk(2, dim, largest=False)[0],
    "cummax": lambda x, dim: x.cummax(dim)[0],
    "cummin, index": lambda x, dim: x.cummin(dim)[1],
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(2, dim),
    "diff": lambda x, dim: x.sign().diff(dim=dim),
    "cumsum": lambda x, dim: x.sign().cumsum(dim),
    "cumprod": lambda x, dim: (x.sign() * 2 + 1).sign().cumprod(dim),
    "gather": lambda x, dim: x.gather(dim, _places(x, dim)),
    "take_along_dim": lambda x, dim: torch.take_along_dim(x, _lower_half(_places(x, dim), dim), dim),
    "scatter": lambda x, dim: torch.zeros_like(x).scatter(dim, _places(x, dim), x),
    "scatter_add": lambda x, dim: x.sign().scatter_add(dim, _places(x, dim) // 2, x.sign()),
    "scatter_reduce": lambda x, dim: x.scatter_reduce(dim, _places(x, dim) // 2, x, "amax"),
    "index_select": lambda x, dim: x.index_select(dim, _row(x, dim)),
    "index_add": lambda x, dim: x.sign().index_add(dim, _row(x, dim) // 2, x.sign(), alpha=2),
    "index_copy": lambda x, dim: torch.zeros_like(x).index_copy(dim, _row(x, dim), x),
    "index_fill": lambda x, dim: x.index_fill(dim, _row(x, dim)[:2], 0.5),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "narrow": _lower_half,
    "cat": lambda x, dim: torch.cat([x, -x], dim),
    "tensor_split": lambda x, dim: torch.cat(x.tensor_split(3, dim)[::-1], dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    # Of up to 268, which float32 has no exponential of: what is exact in 16 bits, and may lie below all of float32's.
    "softmax, large": lambda x, dim: (x * 4).softmax(dim),
    "log_softmax, large": lambda x, dim: (x * 4).log_softmax(dim) - 256,
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "glu": lambda x, dim: F.glu(torch.cat([x, x.sign()], dim), dim),
}
"""Ops that keep the dimension."""

REDUCED: Mapping[str, Over] = {
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "nansum": lambda x, dims, keep: _spoiled(x).nansum(dims, keepdim=keep),
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "nanmean": lambda x, dims, keep: _spoiled(x).nanmean(dims, keepdim=keep),
    "amax": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "amin": lambda x, dims, keep: x.amin(dims, keepdim=keep),
    "std": lambda x, dims, keep: x.std(dims, keepdim=keep),
    "var, not corrected": lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep),
    "var_mean": lambda x, dims, keep: torch.stack(torch.var_mean(x, dims, keepdim=keep)),
    "logsumexp": lambda x, dims, keep: x.logsumexp(dims, keepdim=keep),
    "logsumexp, large": lambda x, dims, keep: (x * 32).logsumexp(dims, keepdim=keep),
    "norm": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keepdim=keep),
    "norm of ord 1": lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keepdim=keep),
    "norm of ord 3": lambda x, dims, keep: torch.linalg.vector_norm(x, 3, dims, keepdim=keep),
    "largest norm": lambda x, dims, keep: torch.linalg.vector_norm(x, torch.inf, dims, keepdim=keep),
    "count_nonzero": lambda x, dims, keep: (x > 0).to(x.dtype).count_nonzero(dims),
    "any": lambda x, dims, keep: (x > 20).any(dims, keepdim=keep),
    "all": lambda x, dims, keep: (x < 20).all(dims, keepdim=keep),
}
"""Ops over any number of dimensions."""

EXACT = ("sum", "nansum", "amax", "amin", "norm of ord 1", "largest norm", "count_nonzero", "any", "all")
"""Of integers these are exact in float32 and rounded once."""


def distinct(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return integers from -60 to 67 of which no two that differ in one coordinate alone are equal."""
    number = torch.randint(0, 128, (), generator=generator)
    for axis, size in enumerate(shape):
        order = torch.randperm(size, generator=generator)
        number = number + order.view([-1 if other == axis else 1 for other in range(len(shape))])
    return (number % 128 - 60).to(dtype)


def whole(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return integers from -2 to 7, whose sums are exact in float32."""
    return torch.randint(-2, 8, shape, generator=generator).to(dtype)


def sets_of_dimensions(rank: int) -> Iterator[tuple[int, ...]]:
    """Yield each set of dimensions that is not empty, in one order or another, some counted from the end."""
    for count in range(1, rank + 1):
        for number, dims in enumerate(itertools.combinations(range(rank), count)):
            yield tuple(dim - rank if (dim + number) % 2 else dim for dim in (dims[::-1] if number % 2 else dims))


def layouts(x: Tensor) -> Mapping[str, Tensor]:
    """Return the tensor as it is and with its dimensions the other way round in memory."""
    around = x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    return {"contiguous": x} if x.dim() < 2 else {"contiguous": x, "transposed": around}
