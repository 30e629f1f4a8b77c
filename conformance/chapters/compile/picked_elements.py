"""Ops that return the places of the elements they pick, of views of 16-bit images in which no number is twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPE = (2, 6, 12, 12)
_ONE = {torch.float16: 0x3C00, torch.bfloat16: 0x3F80}


def images(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return the 16-bit numbers from 1 on, each once, in random order."""
    count = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    bits = (torch.randperm(count, generator=generator) + _ONE[dtype]).to(torch.int16)
    return bits.view(dtype).reshape(SHAPE).to(device)


VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "images": lambda x: x,
    "transposed images": lambda x: x.transpose(2, 3),
    "channels-last images": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every second column": lambda x: torch.stack([x, -x], -1).flatten(3)[..., ::2],
    "transposed channels": lambda x: x.transpose(1, 2),
}


def _pooled(size: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
    return {
        f"max_pool1d by {size}": lambda x: F.max_pool1d(x[0], size, return_indices=True)[1],
        f"max_pool2d by {size}": lambda x: F.max_pool2d(x, size, return_indices=True)[1],
        f"max_pool3d by {size}": lambda x: F.max_pool3d(x[None], (2, size, size), return_indices=True)[1],
    }


_PICKING: Mapping[str, Callable[[Tensor], Tensor]] = {
    **_pooled(2),
    **_pooled(3),
    **_pooled(6),
    "max_pool2d with padding": lambda x: F.max_pool2d(x, (6, 4), (3, 5), (2, 1), return_indices=True)[1],
    "max_pool2d, dilated": lambda x: F.max_pool2d(x, 3, 2, dilation=2, return_indices=True)[1],
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 2), return_indices=True)[1],
    "adaptive_max_pool2d of windows that overlap": lambda x: F.adaptive_max_pool2d(x, (5, 3), return_indices=True)[1],
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 6, return_indices=True), 6),
    "argmax": lambda x: x.argmax(2),
    "argmax of all": torch.argmax,
    "argmin": lambda x: x.argmin(-1),
    "max": lambda x: x.max(1).indices,
    "min": lambda x: x.min(3).indices,
    "sort": lambda x: x.sort(2).indices,
    "argsort, descending": lambda x: x.argsort(-1, descending=True),
    "topk": lambda x: x.topk(3, 2).indices,
    "topk of the smallest": lambda x: x.topk(3, 3, largest=False).indices,
    "cummax": lambda x: x.cummax(3).indices,
    "cummin": lambda x: x.cummin(2).indices,
    "kthvalue": lambda x: x.kthvalue(4, 2).indices,
    "median": lambda x: x.median(3).indices,
    "mode": lambda x: x.mode(2).indices,
}

OPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    f"{name} of {view}": lambda x, pick=pick, see=see: pick(see(x))  # type: ignore[misc]
    for name, pick in _PICKING.items()
    for view, see in VIEWS.items()
    if not (view == "transposed channels" and "2d" in name)  # has six rows
}
