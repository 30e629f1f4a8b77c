"""Calls of one family: the same computation for another rank, size or option."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Call = Callable[[Tensor], Tensor]
Form = tuple[tuple[int, ...], Call]
"""The shape of the operand, and the call."""

# An image of channels 4 and, for each number of dimensions, sides that pools and kernels of 2 divide.
_IMAGE = {1: (2, 4, 8), 2: (2, 4, 8, 6), 3: (2, 4, 4, 6, 8)}


def _each(call: Callable[[int, Tensor], Tensor], images: dict[int, tuple[int, ...]] = _IMAGE) -> dict[str, Form]:
    return {f"{rank}d": (shape, partial(call, rank)) for rank, shape in images.items()}


def _named(name: str, *args: object, **options: object) -> Callable[[int, Tensor], Tensor]:
    """Return a call of the function that this name and a number of dimensions give, such as avg_pool2d."""

    def call(rank: int, x: Tensor) -> Tensor:
        result: Tensor = getattr(F, f"{name}{rank}d")(x, *args, **options)
        return result

    return call


def _convolution(name: str) -> Callable[[int, Tensor], Tensor]:
    def call(rank: int, x: Tensor) -> Tensor:
        result: Tensor = getattr(F, f"{name}{rank}d")(x, x.new_ones(4, 4, *(2,) * rank))
        return result

    return call


def _distances(rows: int, mode: str, x: Tensor) -> Tensor:
    return torch.cdist(x[:rows], x[:rows].flip(0), compute_mode=mode)


def _sampled(rank: int, mode: str, x: Tensor) -> Tensor:
    return F.grid_sample(x, x.new_zeros(2, *(3,) * rank, rank), mode=mode, align_corners=False)


def _resized(mode: str, antialias: bool, x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode=mode, antialias=antialias)


def _padded(rank: int, mode: str, x: Tensor) -> Tensor:
    return F.pad(x, (1,) * (2 * rank), mode=mode)


def _norm(order: float, x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x, order, dim=-1)
    return result


def _softmax(dim: int, x: Tensor) -> Tensor:
    return F.softmax(x, dim)


_MODES = {
    "as torch chooses": "use_mm_for_euclid_dist_if_necessary",
    "by products": "use_mm_for_euclid_dist",
    "without products": "donot_use_mm_for_euclid_dist",
}
_INTERPOLATIONS = {"nearest": 2, "linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3, "area": 2}
FAMILIES: dict[str, dict[str, Form]] = {
    "cdist": {
        f"{rows} rows, {what}": ((32, 4), partial(_distances, rows, mode))
        for rows in (5, 32)
        for what, mode in _MODES.items()
    },
    "local_response_norm": _each(lambda rank, x: F.local_response_norm(x, 2)),
    "avg_pool": _each(_named("avg_pool", 2)),
    "adaptive_avg_pool": _each(_named("adaptive_avg_pool", 2)),
    "max_pool": _each(_named("max_pool", 2)),
    "adaptive_max_pool": _each(_named("adaptive_max_pool", 2)),
    "lp_pool": _each(_named("lp_pool", 2.0, 2)),
    "conv": _each(_convolution("conv")),
    "conv_transpose": _each(_convolution("conv_transpose")),
    "batch_norm": _each(lambda rank, x: F.batch_norm(x, None, None, training=True)),
    "instance_norm": _each(lambda rank, x: F.instance_norm(x)),
    "group_norm": _each(lambda rank, x: F.group_norm(x, 2)),
    "dropout": _each(_named("dropout")),
    "interpolate": {mode: (_IMAGE[rank], partial(_resized, mode, False)) for mode, rank in _INTERPOLATIONS.items()},
    "interpolate_antialiased": {
        f"{mode}, antialias={smooth}": (_IMAGE[2], partial(_resized, mode, smooth))
        for mode in ("bilinear", "bicubic")
        for smooth in (False, True)
    },
    "grid_sample": {
        f"{mode}, {rank}d": (_IMAGE[rank], partial(_sampled, rank, mode))
        for mode in ("bilinear", "nearest")
        for rank in (2, 3)
    },
    "pad": {
        f"{mode}, {rank}d": (_IMAGE[rank], partial(_padded, rank, mode))
        for mode in ("constant", "reflect", "replicate", "circular")
        for rank in (1, 2, 3)
    },
    "vector_norm": {
        str(order): ((3, 40), partial(_norm, order)) for order in (0.0, 1.0, 2.0, 3.0, 0.5, float("inf"), float("-inf"))
    },
    "softmax": {f"dimension {dim}": ((3, 4, 5), partial(_softmax, dim)) for dim in (0, 1, 2)},
}
