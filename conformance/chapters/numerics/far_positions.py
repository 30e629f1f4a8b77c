"""Ops that compute with positions and counts, over more elements than a 16-bit type can count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

LONG = 2500
"""Elements of a dimension: fp16 has all integers to 2,048, bf16 to 256."""

Call: TypeAlias = Callable[[Tensor], Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Far:
    """A call on a vector of LONG small integers; it `interpolates`, or else only moves, picks, counts or adds up."""

    call: Call
    interpolates: bool = False


def values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return LONG integers from -4 to 4, in an order that does not repeat with a power of two."""
    return (torch.arange(LONG, device=device) ** 2 % 23 % 9 - 4).to(dtype)


def places(x: Tensor, *, of: int = LONG) -> Tensor:
    """Return LONG places from 0 to `of` - 1, far from their order."""
    return (torch.arange(LONG, device=x.device) * 1117 + 31) % of


def _place(x: Tensor) -> Tensor:
    """Return one place, which neither 16-bit type holds."""
    return torch.tensor([2347], device=x.device)


def _loss_of_threes(x: Tensor, **options: Any) -> Tensor:
    """Return the loss of LONG rows whose terms are threes.

    Numerators and denominators that stop growing where they round do so at other numbers; of ones they do at the same.
    """
    loss: Tensor = F.nll_loss(-3 * _ones(x)[:, None], x.new_zeros(LONG, dtype=torch.int64), **options)
    return loss


def _ones(x: Tensor) -> Tensor:
    """Return as many ones, which the vector has a part in."""
    return x * 0 + 1


def _signal(x: Tensor) -> Tensor:
    return x.view(1, 1, LONG)


def _tall(x: Tensor) -> Tensor:
    return x.view(1, 1, LONG, 1).expand(1, 2, LONG, 2)


def _wide(x: Tensor) -> Tensor:
    return x.view(1, 1, 1, LONG).expand(1, 2, 2, LONG)


def _last(x: Tensor) -> Tensor:
    return _wide(x).contiguous(memory_format=torch.channels_last)


def _tall_last(x: Tensor) -> Tensor:
    return _tall(x).contiguous(memory_format=torch.channels_last)


def _volume(x: Tensor) -> Tensor:
    return x.view(1, 1, 1, 1, LONG).expand(1, 1, 2, 2, LONG)


_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "of a signal": _signal,
    "of a tall picture": _tall,
    "of a wide picture": _wide,
    "of a wide picture, channels last": _last,
    "of a tall picture, channels last": _tall_last,
    "of a volume": _volume,
}
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _resized(shape: Callable[[Tensor], Tensor], mode: str, **options: Any) -> Call:
    def call(x: Tensor) -> Tensor:
        whole = shape(x)
        return F.interpolate(whole, mode=_LINEAR[whole.dim()] if mode == "linear" else mode, **options)

    return call


def _interpolations() -> dict[str, Far]:
    found = {}
    for name, shape in _SHAPES.items():
        for mode in ("nearest", "nearest-exact", "area"):
            found[f"interpolate, {mode}, twice the size {name}"] = Far(_resized(shape, mode, scale_factor=2))
        found[f"interpolate, nearest, half the size {name}"] = Far(_resized(shape, "nearest", scale_factor=0.5))
        for corners in (False, True):
            options: dict[str, Any] = {"scale_factor": 2, "align_corners": corners}
            which = "corners aligned" if corners else "corners not aligned"
            found[f"interpolate, linear, {which}, {name}"] = Far(_resized(shape, "linear", **options), True)
    for name in ("of a tall picture", "of a wide picture"):
        found[f"interpolate, bicubic, {name}"] = Far(_resized(_SHAPES[name], "bicubic", scale_factor=2), True)
        smooth = _resized(_SHAPES[name], "bilinear", scale_factor=2, antialias=True)
        found[f"interpolate, bilinear, antialias, {name}"] = Far(smooth, True)
    return found


def _steps(x: Tensor) -> Tensor:
    """Return a vector of which no five neighbours are equal, and which the vector has a part in."""
    return (torch.arange(LONG, device=x.device) * 7 % 5).to(x.dtype) + x * 0


def _pooled(shape: Callable[[Tensor], Tensor], adaptive: bool) -> Call:
    """Return what pools five elements of the long dimension at a time, with their places."""

    def call(x: Tensor) -> Sequence[Tensor]:
        whole = shape(_steps(x))
        windows = [5 if side == LONG else 1 for side in whole.shape[2:]]
        sizes = [side // window for side, window in zip(whole.shape[2:], windows, strict=True)]
        pool = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{len(windows)}d")
        found: Sequence[Tensor] = pool(whole, sizes if adaptive else windows, return_indices=True)
        return found

    return call


def _unpooled(x: Tensor) -> Tensor:
    kept, where = F.max_pool1d(_signal(_steps(x)), 5, return_indices=True)
    return F.max_unpool1d(kept, where, 5)


_ORDERS: dict[str, Far] = {
    "argmax": Far(lambda x: x.index_fill(0, _place(x), 9).argmax()),
    "argmin": Far(lambda x: x.index_fill(0, _place(x), -9).argmin()),
    "argmax of columns": Far(lambda x: torch.stack([x, x.roll(1)], 1).index_fill(0, _place(x), 9).argmax(0)),
    "max with its place": Far(lambda x: x.index_fill(0, _place(x), 9).max(0)),
    "stable sort": Far(lambda x: torch.sort(x, stable=True)),
    "stable argsort, descending": Far(lambda x: torch.argsort(x, stable=True, descending=True)),
    "topk": Far(lambda x: x.index_fill(0, _place(x), 9).topk(1)),
    "kthvalue": Far(lambda x: x.index_fill(0, _place(x), 9).kthvalue(LONG)),
    "cummax of steps": Far(lambda x: (x > 3).to(x.dtype).cumsum(0).clamp(max=8).cummax(0)[0]),
    "searchsorted": Far(lambda x: torch.searchsorted(x.sort()[0], x[:9], right=True)),
    "bucketize": Far(lambda x: torch.bucketize(x[:9], x.sort()[0])),
    "nonzero": Far(lambda x: x.nonzero()),
    "count_nonzero": Far(lambda x: x.count_nonzero()),
    "unique with counts": Far(lambda x: torch.unique(x.detach(), return_inverse=True, return_counts=True)),
    "unique_consecutive with counts": Far(
        lambda x: torch.unique_consecutive(x.detach().sort()[0], return_inverse=True, return_counts=True)
    ),
    "bincount of weights": Far(lambda x: torch.bincount(places(x, of=50), x.detach())),
}
_MOVES: dict[str, Far] = {
    "roll": Far(lambda x: x.roll(1117)),
    "flip": Far(lambda x: x.flip(0)),
    "index": Far(lambda x: x[places(x)]),
    "index_select": Far(lambda x: x.index_select(0, places(x))),
    "gather": Far(lambda x: x.gather(0, places(x))),
    "take": Far(lambda x: x.take(places(x))),
    "take_along_dim": Far(lambda x: x[:, None].take_along_dim(places(x)[:, None], 0)),
    "scatter": Far(lambda x: torch.zeros_like(x).scatter(0, places(x), x)),
    "index_copy": Far(lambda x: torch.zeros_like(x).index_copy(0, places(x), x)),
    "index_put": Far(lambda x: torch.zeros_like(x).index_put((places(x),), x)),
    "masked_select": Far(lambda x: x.masked_select(places(x) % 3 == 0)),
    "masked_scatter": Far(lambda x: torch.zeros_like(x).masked_scatter(places(x) % 3 == 0, x)),
    "repeat_interleave": Far(lambda x: x.repeat_interleave(places(x, of=3))),
    "embedding": Far(lambda x: F.embedding(places(x), x[:, None])),
    "tril": Far(lambda x: x.expand(3, LONG).tril(LONG - 7)),
    "triu": Far(lambda x: x.expand(3, LONG).triu(LONG - 7)),
    "diagonal": Far(lambda x: x.expand(3, LONG).diagonal(LONG - 3)),
    "unfold": Far(lambda x: x.unfold(0, 5, 2)),
    "unfold of pictures": Far(lambda x: F.unfold(_wide(x), (2, 3))),
    "reflected padding": Far(lambda x: F.pad(_signal(x), (1500, 1500), mode="reflect")),
    "circular padding": Far(lambda x: F.pad(_signal(x), (1500, 1500), mode="circular")),
    "replicated padding": Far(lambda x: F.pad(_signal(x), (1500, 1500), mode="replicate")),
    "pixel_shuffle": Far(lambda x: F.pixel_shuffle(x.view(1, 4, 1, 625), 2)),
    "channel_shuffle": Far(lambda x: F.channel_shuffle(x.view(1, LONG, 1, 1), 50)),
    "nll_loss of far classes": Far(lambda x: F.nll_loss(x.expand(1, LONG), _place(x))),
}
_POOLS: dict[str, Far] = {
    **{f"max_pool {name}": Far(_pooled(shape, False)) for name, shape in _SHAPES.items()},
    **{f"adaptive_max_pool {name}": Far(_pooled(shape, True)) for name, shape in _SHAPES.items()},
    "max_unpool1d": Far(_unpooled),
    "avg_pool1d of ones": Far(lambda x: F.avg_pool1d(_signal(_ones(x)), LONG)),
    "avg_pool2d of ones": Far(lambda x: F.avg_pool2d(_ones(x).view(1, 1, 50, 50), 50)),
    "avg_pool2d of ones, padded": Far(
        lambda x: F.avg_pool2d(_ones(x).view(1, 1, 50, 50), 52, padding=1, count_include_pad=False)
    ),
    "avg_pool3d of ones": Far(lambda x: F.avg_pool3d(_ones(x).view(1, 1, 4, 25, 25), (4, 25, 25))),
    "adaptive_avg_pool1d of ones": Far(lambda x: F.adaptive_avg_pool1d(_signal(_ones(x)), 3)),
    "adaptive_avg_pool2d of ones": Far(lambda x: F.adaptive_avg_pool2d(_ones(x).view(1, 1, 50, 50), 1)),
    "adaptive_avg_pool3d of ones": Far(lambda x: F.adaptive_avg_pool3d(_ones(x).view(1, 1, 4, 25, 25), 1)),
    "mean of ones": Far(lambda x: _ones(x).mean()),
    "scatter_reduce, mean of ones": Far(
        lambda x: x.new_zeros(2).scatter_reduce(0, places(x, of=2), _ones(x), "mean", include_self=False)
    ),
    "index_reduce, mean of ones": Far(
        lambda x: x.new_zeros(2).index_reduce(0, places(x, of=2), _ones(x), "mean", include_self=False)
    ),
    "mse_loss of ones": Far(lambda x: F.mse_loss(_ones(x), torch.zeros_like(x))),
    "l1_loss of ones": Far(lambda x: F.l1_loss(_ones(x), torch.zeros_like(x))),
    "kl_div of ones": Far(lambda x: F.kl_div(-_ones(x), torch.ones_like(x), reduction="mean")),
    "mean of ones of a picture": Far(lambda x: _ones(x).view(50, 50).mean((0, 1))),
    "embedding_bag, mean of ones": Far(lambda x: F.embedding_bag(places(x)[None], _ones(x)[:, None], mode="mean")),
    "embedding_bag, max of far bags": Far(
        lambda x: F.embedding_bag(places(x), x[:, None], torch.arange(0, LONG, 2, device=x.device), mode="max")
    ),
    "nll_loss, mean over far rows": Far(_loss_of_threes),
    "nll_loss, sum over far rows": Far(partial(_loss_of_threes, reduction="sum")),
    "nll_loss, weighted mean over far rows": Far(lambda x: _loss_of_threes(x, weight=torch.full_like(x[:1], 2))),
}
FAMILIES: dict[str, dict[str, Far]] = {
    "interpolation": _interpolations(),
    "orders": _ORDERS,
    "moves": _MOVES,
    "pooling": _POOLS,
}


def answers(far: Far, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the results of a call on operands of a type, and the gradient of the vector by the first of them."""
    x = values(dtype, device).requires_grad_()
    found = far.call(x)
    results = [found] if isinstance(found, Tensor) else list(found)
    first = results[0]
    if first.is_floating_point() and first.requires_grad:
        weights = (torch.arange(first.numel(), device=device) * 5 % 7 - 3).to(dtype).view(first.shape)
        results += torch.autograd.grad(first, x, weights)
    return [one.detach() for one in results]
