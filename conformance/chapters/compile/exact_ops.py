"""Ops of 16-bit matrices of small integers whose results every type holds: indices, writes, sums, statistics, casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Op = Callable[[Tensor], Tensor]
COLUMNS = 8
_HALF = COLUMNS // 2


def matrix(rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return integers from -2 to 2, of which every row and column has some twice."""
    return torch.randint(-2, 3, (rows, COLUMNS), generator=generator).to(device, dtype)


def _repeated(x: Tensor) -> Tensor:
    return torch.tensor([2, 0, 2, 1, 2], device=x.device)


def _negative(x: Tensor) -> Tensor:
    return torch.tensor([-1, 1, -2], device=x.device)


def _square(x: Tensor) -> Tensor:
    """Return two rows of as many indices as there are columns."""
    return (torch.arange(2 * COLUMNS, device=x.device) % 3).reshape(2, COLUMNS)


def _columns(x: Tensor) -> Tensor:
    return _repeated(x)[:, None].expand(5, COLUMNS)


_INDICES: dict[str, Op] = {
    "index_add": lambda x: x.index_add(0, _repeated(x), x[:5]),
    "index_add with alpha": lambda x: x.index_add(0, _repeated(x), x[:5], alpha=2),
    "index_put with accumulate": lambda x: x.index_put((_repeated(x),), x[:5], accumulate=True),
    "scatter_add": lambda x: x.scatter_add(0, _columns(x), x[:5]),
    "rows of negative indices": lambda x: x[_negative(x)],
    "columns of negative indices": lambda x: x[:, _negative(x)],
    "elements of negative indices": lambda x: x[_negative(x), _negative(x)],
    "index_select": lambda x: x.index_select(0, _repeated(x)),
    "gather": lambda x: x.gather(0, _columns(x)),
    "embedding": lambda x: F.embedding(_repeated(x), x),
    "slices in reverse": lambda x: torch.cat([x[:, _HALF:], x[:, :_HALF]], 1),
    "a rotated half": lambda x: torch.cat([-x[:, _HALF:], x[:, :_HALF]], -1),
    "rows in reverse": lambda x: torch.cat([x[2:4], x[:2]]),
    "stacked slices": lambda x: torch.stack([x[:, _HALF:], x[:, :_HALF]]),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(1),
    "argmax of ties": lambda x: x.argmax(-1),
    "argmin of ties": lambda x: x.argmin(0),
    "argmax of all": lambda x: x.argmax(),
    "stable order": lambda x: torch.sort(x, dim=-1, stable=True).indices,
}
"""Ops with indices that are repeated, negative or not in order, of slices, and of ties."""


def _rows(x: Tensor) -> Tensor:
    """Return a mask of every second row, with one column for all."""
    return (torch.arange(x.shape[0], device=x.device) % 2 == 1)[:, None]


def _assigned(place: Any, value: Op) -> Op:
    """Return a function that writes to a part of a copy."""

    def write(x: Tensor) -> Tensor:
        copy = x.clone()
        copy[place] = value(x)
        return copy

    return write


def _resized(mode: str, size: tuple[int, int] | None, factor: float | None) -> Op:
    return lambda x: F.interpolate(x[None, None], size, factor, mode)


_WRITES: dict[str, Op] = {
    "an assigned column": _assigned((slice(None), 1), lambda x: x[:, 0]),
    "an assigned last column": _assigned((slice(None), -1), lambda x: x[:, 0]),
    "assigned rows": _assigned(slice(1, 3), lambda x: x[3:5]),
    "every second column assigned": _assigned((slice(None), slice(1, None, 2)), lambda x: x[:, ::2]),
    "elements assigned": _assigned(([0, 2, -1], [1, -1, 0]), lambda x: x[0, :3]),
    "rows assigned by a mask": lambda x: torch.where(_rows(x), x.roll(1, 1), x),
    "masked_fill of rows": lambda x: x.masked_fill(_rows(x), 3.0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.roll(1, 1)),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([2, 0], device=x.device), x[3:5]),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([1, 6], device=x.device), 3.0),
    "scatter of numbers": lambda x: x.scatter(1, _columns(x)[:, :2], 3.0),
    **{
        f"interpolate, {mode}, {how}": _resized(mode, size, factor)
        for mode in ("nearest", "nearest-exact")
        for how, size, factor in (("to other sizes", (3, 5), None), ("by a factor", None, 1.5))
    },
    "padded by reflection": lambda x: F.pad(x[None], (1, 2, 2, 1), mode="reflect"),
    "padded in a circle": lambda x: F.pad(x[None], (1, 2, 2, 1), mode="circular"),
    "normal numbers of no deviation": lambda x: (x * 0).normal_(3.0, 0.0),
    "normal numbers of no deviation about a tensor": lambda x: torch.normal(x, 0.0),
    "certain draws": lambda x: (x * 0).bernoulli_(1.0),
}
"""Writes to parts, by masks and by places, resizing that moves numbers, and random numbers that can be but one."""


def _places(x: Tensor) -> Tensor:
    """Return a number for each element of a row, so that no two of a window are the same, which 8 bits hold."""
    return torch.arange(COLUMNS, device=x.device).to(x.dtype)


def _gradient(call: Callable[[Tensor], Tensor]) -> Op:
    """Return the gradient of a function of the matrix for what comes in of small integers."""

    def gradient(x: Tensor) -> Tensor:
        result, back = torch.func.vjp(call, x)
        incoming = torch.arange(result.numel(), device=x.device) % 5 - 2
        found: Tensor = back(incoming.to(result.dtype).reshape(result.shape))[0]
        return found

    return gradient


_GRADIENTS: dict[str, Op] = {
    f"gradient of {name}": _gradient(call)
    for name, call in {
        "embedding": lambda x: F.embedding(_repeated(x), x),
        "embedding with padding": lambda x: F.embedding(_repeated(x), x, padding_idx=1),
        # As many rows as columns, so that the mask of the padding fits along the wrong dimension too.
        "embedding of rows, with padding": lambda x: F.embedding(_square(x), x, padding_idx=1),
        "index_select": lambda x: x.index_select(0, _repeated(x)),
        "gather": lambda x: x.gather(0, _columns(x)),
        "negative indices": lambda x: x[_negative(x)],
        "a rotated half": lambda x: torch.cat([-x[:, _HALF:], x[:, :_HALF]], -1),
        "an assigned column": _assigned((slice(None), 1), lambda x: x[:, 0] * 2),
        "interpolate, nearest": _resized("nearest", (3, 5), None),
        "max_pool2d": lambda x: F.max_pool2d(x[None], 2, 1),
        "overlapping maxima": lambda x: F.max_pool2d(x[None] * 8 + _places(x), 3, 1, 1),
        "a sum of windows": lambda x: F.avg_pool2d(x[None], 2, 2, divisor_override=1),
        "overlapping windows": lambda x: x.unfold(1, 3, 1),
        "columns in a circle": lambda x: x.roll(3, 1),
        "columns in reverse": lambda x: x.flip(1),
        **{
            f"padding, {mode}": lambda x, mode=mode: F.pad(x[None], (1, 2, 2, 1), mode=mode)  # type: ignore[misc]
            for mode in ("reflect", "replicate", "circular")
        },
        "padding of rows, reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
        "padding of rows, replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
    }.items()
}


# A divisor that is a tensor, a number, and one below zero, as no two of them need take the same lowering.
_DIVISORS: dict[str, Op] = {
    "2": lambda x: torch.full_like(x, 2.0),
    "a number": lambda x: torch.tensor(2.0, device=x.device),
    "-2": lambda x: torch.full_like(x, -2.0),
}
_ROUNDED: dict[str, Op] = {
    **{
        f"quotient by {what}, {mode}": lambda x, of=of, mode=mode: torch.div(  # type: ignore[misc]
            x, of(x), rounding_mode=mode
        )
        for what, of in _DIVISORS.items()
        for mode in ("floor", "trunc")
    },
    **{f"remainder by {what}": lambda x, of=of: x % of(x) for what, of in _DIVISORS.items()},  # type: ignore[misc]
    **{f"fmod by {what}": lambda x, of=of: torch.fmod(x, of(x)) for what, of in _DIVISORS.items()},  # type: ignore[misc]
    "floor of a quotient": lambda x: x // 2,
    "remainder": lambda x: x % 2,
    "halves to even": lambda x: (x / 2).round(),
}
"""Quotients and remainders that are rounded to integers."""


def _batches(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ones = torch.ones(2, 3, 3, dtype=x.dtype, device=x.device)
    return ones, x[:3].reshape(2, 3, 4), x[:3].reshape(2, 4, 3)


def _two(x: Tensor) -> Tensor:
    return torch.tensor(2.0, device=x.device)


def _signs(x: Tensor) -> Tensor:
    """Return 1, -1, 1 and so on: of variance 1, and 2 with a correction of half their number."""
    return 1 - 2 * (torch.arange(COLUMNS, device=x.device) % 2).to(x.dtype)


def _labels(x: Tensor) -> Tensor:
    return torch.tensor([0, -100, 2, 1, -100, 3], device=x.device)


def _baddbmm(x: Tensor, beta: float, alpha: int = 1) -> Tensor:
    ones, a, b = _batches(x)
    return torch.baddbmm(ones, a, b, beta=beta, alpha=alpha)


def _addmm(x: Tensor) -> Tensor:
    ones, a, b = _batches(x)
    return torch.addmm(ones[0], a[0], b[0], beta=0.5, alpha=2)


_SUMS: dict[str, Op] = {
    "baddbmm with beta": lambda x: _baddbmm(x, 0.5),
    "baddbmm without its sum": lambda x: _baddbmm(x, 0, 2),
    "addmm with beta and alpha": _addmm,
    "addmv with beta": lambda x: torch.addmv(x[:, 0], x, x[0], beta=0.5),
    **{
        f"product of {size} terms": lambda x, size=size: x[:1, :size] @ x[0, :size, None]  # type: ignore[misc]
        for size in (1, 2, 5, 7)
    },
    "outer product": lambda x: x[:, :1] @ x[:1],
    "matrix by vector": lambda x: x @ x[0],
    "times one number": lambda x: x * _two(x),
    "one number times it": lambda x: _two(x) * x,
    "over one number": lambda x: x / _two(x),
    "plus one number": lambda x: x + _two(x),
    "times a matrix of one number": lambda x: x * _two(x).reshape(1, 1),
    "mean of rows": lambda x: (x * 0 + 2).mean(0),
    "mean of all": lambda x: (x * 0 + 3).mean(),
    "sum": lambda x: x.sum((0, 1)),
    "group_norm": lambda x: F.group_norm(_signs(x).expand(2, 2, COLUMNS), 2),
    "instance_norm": lambda x: F.instance_norm(_signs(x).expand(2, 2, COLUMNS)),
    "var, biased": lambda x: _signs(x).expand(3, COLUMNS).var(-1, correction=0),
    "var, corrected by half": lambda x: _signs(x).expand(3, COLUMNS).var(-1, correction=_HALF),
    "std, biased": lambda x: _signs(x).expand(3, COLUMNS).std(-1, correction=0),
    "var_mean, biased": lambda x: torch.var_mean(_signs(x).expand(3, COLUMNS), -1, correction=0)[0],
    "nll_loss that ignores rows": lambda x: F.nll_loss(x[:6] * 4, _labels(x)),
    "nll_loss, summed": lambda x: F.nll_loss(x[:6], _labels(x), reduction="sum"),
}
"""Products, statistics and losses that are integers, halves or quarters."""


def _ending(x: Tensor) -> Tensor:
    """Return labels of which a row has all, some, one or none, and others after the first -1."""
    return torch.tensor(
        [[0, 1, -1, 2, -1, -1, -1, -1], [-1] * COLUMNS, [3, -1, 4, 5, 6, 7, 0, 1], list(range(COLUMNS))],
        device=x.device,
    )


def _classes(x: Tensor) -> Tensor:
    return torch.arange(4, device=x.device) * 2


_LOSSES: dict[str, Op] = {
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[:4].float() * 2, _ending(x), reduction="none"),
    "multilabel_margin_loss of one row": lambda x: F.multilabel_margin_loss(x[2].float() * 2, _ending(x)[2]),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x[:4].float() * 2, _classes(x), reduction="none"),
    "multi_margin_loss, squared": lambda x: F.multi_margin_loss(
        x[:4].float(), _classes(x), p=2, margin=2, reduction="none"
    ),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(
        x[:2], x[2:4], _signs(x).expand(2, -1), margin=1.0, reduction="none"
    ),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, _signs(x).expand_as(x), margin=2.0, reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x[:2], x[2:4], beta=2.0, reduction="sum"),
    "huber_loss": lambda x: F.huber_loss(x[:2], x[2:4], delta=2.0, reduction="sum"),
    "mse_loss": lambda x: F.mse_loss(x[:2], x[2:4]),
    "l1_loss": lambda x: F.l1_loss(x[:2], x[2:4], reduction="none"),
}
_LOSSES |= {f"gradient of {name}": _gradient(call) for name, call in _LOSSES.items()}
"""Losses with labels and options that their formulas must not mix up; of classes in float32, as CPUs have them."""

_KINDS = {torch.uint8: 255, torch.int8: 127, torch.int16: 2**15 - 2**7, torch.int32: 2**15, torch.int64: 2**15}


def _converted(kind: torch.dtype, end: int) -> Op:
    """Return a function that adds integers of `kind`, up to the end of its range, to a matrix."""
    low = 0 if kind is torch.uint8 else -end
    return lambda x: torch.tensor([low, end // 2, end], dtype=kind, device=x.device).to(x.dtype)


_CONVERSIONS: dict[str, Op] = {
    **{f"conversion of {kind}": _converted(kind, end) for kind, end in _KINDS.items()},
    **{
        f"conversion to {kind} and back": lambda x, kind=kind: x.abs().to(kind).to(x.dtype)  # type: ignore[misc]
        for kind in (*_KINDS, torch.bool)
    },
}

NEAR_ZERO: Mapping[str, tuple[str, ...]] = {
    "by series": ("log1p", "sin", "sinh", "tan", "tanh", "asin", "asinh", "atan"),
    "by differences": ("expm1", "atanh"),  # exp(x) - 1 and half of log((1 + x) / (1 - x)) cancel
}
"""Functions that give a number near zero itself, for 16 bits: by how they are usually computed."""


def small(x: Tensor) -> Tensor:
    """Return numbers below the unit roundoff of float32, which each 16-bit type holds: of float16, subnormal ones."""
    return x * 2.0 ** (-24 if x.dtype is torch.float16 else -30)


GROUPS: Mapping[str, Mapping[str, Op]] = {
    "indices": _INDICES,
    "writes": _WRITES,
    "gradients": _GRADIENTS,
    "rounded": _ROUNDED,
    "sums": _SUMS,
    "losses": _LOSSES,
    "conversions": _CONVERSIONS,
}
OPS: Mapping[str, Op] = {name: op for group in GROUPS.values() for name, op in group.items()}
