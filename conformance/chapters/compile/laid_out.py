"""Functions of images and volumes whose kernels walk over memory, and layouts of what they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.relations.values import ALL_LAYOUTS

Function: TypeAlias = Callable[[Tensor], Tensor]
IMAGE, VOLUME = (2, 4, 6, 6), (2, 4, 4, 6, 6)


def _weight(x: Tensor, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel(), device=x.device) % 3 - 1).to(x.dtype).reshape(shape)


def _places(x: Tensor) -> Tensor:
    """Return other integers for the neighbours of each element, so that no two of a window are the same."""
    return x * 64 + torch.arange(x.numel(), device=x.device).remainder(61).to(x.dtype).reshape(x.shape)


def _unpooled(x: Tensor) -> Tensor:
    found, places = F.max_pool2d(_places(x), 2, return_indices=True)
    return F.max_unpool2d(found, places, 2)


def _samples(x: Tensor, dimensions: int) -> Tensor:
    return torch.full((*x.shape[:2], dimensions), 0.5, dtype=x.dtype, device=x.device)


def _convolved(x: Tensor) -> Tensor:
    return F.conv2d(x, _weight(x, 4, 4, 3, 3), padding=1)


def _pooled_or_not(x: Tensor) -> Tensor:
    """Return what a convolution gives, or the maxima of its windows at every second place."""
    y = _convolved(x)
    second = torch.arange(y.numel(), device=y.device).reshape(y.shape) % 2 == 0
    return torch.where(second, y, F.max_pool2d(y, 3, 1, 1))


# Of integers, with results and gradients that are integers or fractions of powers of two, but for what `_near` allows.
OF_IMAGES: Mapping[str, Function] = {
    "max_pool2d": lambda x: F.max_pool2d(_places(x), 3, 2, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(_places(x), (2, 3)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        _places(x), 2, output_size=3, _random_samples=_samples(x, 2)
    ),
    "max_unpool2d": _unpooled,
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "overlapping avg_pool2d": lambda x: F.avg_pool2d(x, 4, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 3)),
    "conv2d": _convolved,
    "depthwise conv2d": lambda x: F.conv2d(x, _weight(x, 4, 1, 3, 3), stride=2, padding=1, groups=4),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, _weight(x, 4, 2, 2, 2), stride=2),
    "interpolate, nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "interpolate to fewer": lambda x: F.interpolate(x, size=(4, 3), mode="nearest"),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, _weight(x, 4) + 2, training=True),
    "group_norm": lambda x: F.group_norm(x, 2, _weight(x, 4) + 2),
    "prelu by channel": lambda x: F.prelu(x, _weight(x, 4) / 4),
    "softmax over channels": lambda x: x.softmax(1),
    "glu over channels": lambda x: F.glu(x, 1),
    "running sums": lambda x: x.cumsum(2),
    "running maxima": lambda x: _places(x).cummax(3).values,
    "sorted": lambda x: _places(x).sort(1).values,
    "the largest": lambda x: _places(x).topk(2, 3).values,
    "sums of channels": lambda x: x.sum(1),
    "sums of images": lambda x: x.sum((0, 2, 3)),
    "rows in reverse": lambda x: x.flip(2),
    "a product of its matrices": lambda x: x @ x.transpose(2, 3),
    "flattened": lambda x: x.flatten(1) * 2,
    "beside a copy of another layout": lambda x: torch.cat([x, x.contiguous()], 1),
    "a convolution, pooled or not": _pooled_or_not,
    "a convolution and its maxima": lambda x: (lambda y: y * 2 + F.max_pool2d(y, 3, 1, 1))(_convolved(x)),
    "a convolution and its means": lambda x: (lambda y: y * 2 + F.avg_pool2d(y, 2, 1)[..., :1, :1])(_convolved(x)),
}

PADDED: Mapping[str, Function] = {
    mode: lambda x, mode=mode: F.pad(x, (1, 2, 2, 1), mode=mode)  # type: ignore[misc]
    for mode in ("replicate", "reflect", "circular", "constant")
}

OF_VOLUMES: Mapping[str, Function] = {
    "max_pool3d": lambda x: F.max_pool3d(_places(x), 2, 2),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(_places(x), 2),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        _places(x), 2, output_size=2, _random_samples=_samples(x, 3)
    ),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
    "conv3d": lambda x: F.conv3d(x, _weight(x, 4, 4, 2, 2, 2)),
    "interpolate, nearest, volumes": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "sums of voxels": lambda x: x.sum((2, 3, 4)),
}


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(0)], -1)[..., 0]


def _last_first(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _part_of_a_larger_one(x: Tensor) -> Tensor:
    return F.pad(x, (1, 0, 2, 1))[..., 2:-1, 1:]


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "channels last": ALL_LAYOUTS["channels last"],
    "transposed": _last_first,
    "with gaps": _every_second,
    "a part": _part_of_a_larger_one,
    "images last": lambda x: x.permute(1, 2, 3, *range(4, x.ndim), 0).contiguous().permute(-1, *range(x.ndim - 1)),
}
