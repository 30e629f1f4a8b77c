"""Calls on images of any number of channels, with a weight for each channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .row_calls import Kind

LAYOUTS = ("as given", "channels last")
SIDE = 3


def _batch_norm(x: Tensor, weight: Tensor, training: bool = True) -> tuple[Tensor, Tensor]:
    """Return what batch norm gives with float32 parameters, and the running statistics that it leaves."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    mean, variance = torch.zeros_like(wide).detach(), torch.ones_like(wide).detach()
    result = functional.batch_norm(x, mean, variance, wide, wide.flip(0), training, 1.0)
    return result, torch.cat((mean, variance)) + 0 * result.flatten()[0]


def _depthwise(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), padding=1, groups=x.shape[1])


def _pointwise(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, torch.stack((weight, weight.flip(0)))[..., None, None], weight[:1].expand(2))


def _whole(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight[None, :, None, None].expand(2, -1, 2, 2))


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv_transpose2d(x, weight[:, None, None, None].expand(-1, 2, 2, 2))


# The gradient of a weight that several places share is a sum, which may cancel in each of a few channels.
CHANNEL_CALLS: Mapping[str, Kind] = {
    "batch_norm in training": Kind(lambda x, w: _batch_norm(x, w)[0], 4),
    "running statistics": Kind(lambda x, w: _batch_norm(x, w)[1]),
    "batch_norm": Kind(lambda x, w: _batch_norm(x, w, training=False)[0], 4),
    "instance_norm": Kind(lambda x, w: functional.instance_norm(x, weight=w, bias=w.flip(0)), 4),
    "group_norm": Kind(lambda x, w: functional.group_norm(x, 1, w, w.flip(0)), 4),
    "prelu": Kind(lambda x, w: functional.prelu(x, w)),
    "depthwise conv2d": Kind(_depthwise, 4),
    "pointwise conv2d": Kind(_pointwise, 4),
    "conv2d": Kind(_whole, 4),
    "conv_transpose2d": Kind(_transposed, 4),
    "max_pool2d": Kind(lambda x, w: functional.max_pool2d(x, 2, 1, 1)),
    "avg_pool2d": Kind(lambda x, w: functional.avg_pool2d(x, 2, 1, 1)),
    "adaptive_avg_pool2d": Kind(lambda x, w: functional.adaptive_avg_pool2d(x, 2)),
    "adaptive_max_pool2d": Kind(lambda x, w: functional.adaptive_max_pool2d(x, 2)),
    "nearest interpolate": Kind(lambda x, w: functional.interpolate(x, scale_factor=2, mode="nearest")),
    "bilinear interpolate": Kind(lambda x, w: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "softmax of channels": Kind(lambda x, w: (x * 0.25).softmax(1), 16),
    "sum of images": Kind(lambda x, w: (x * w[:, None, None]).sum((0, 2, 3))),
    "cat": Kind(lambda x, w: torch.cat((x, x * w[:, None, None]), 1)),
}


def images(rng: torch.Generator, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two images, a weight and the numbers that a gradient comes in with; the last channel stands out."""
    sizes = ((2, channels, SIDE, SIDE), (channels,), (131,))
    x, weight, incoming = (torch.randint(-6, 7, size, generator=rng) / 4 for size in sizes)
    x[:, -1] += 3
    x[-1, :, -1, -1] += 2
    weight[-1] = 2.5
    incoming[::3] += 1
    return x, weight, incoming
