"""Calls on more samples than 16 bits count, each of which needs its own sample alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# From a batch and the other operands to a result whose first dimension is the batch.
Call: TypeAlias = Callable[..., Tensor]
LIMIT = 2**16 - 1
"""Of each dimension but the first of a grid of blocks of CUDA: a kernel that asks for more is not launched."""


@dataclass(frozen=True)
class Calls:
    """A call, the shape of a sample, and those of the other operands."""

    call: Call
    sample: tuple[int, ...]
    others: Sequence[tuple[int, ...]] = ()


def _attention(query: Tensor, key: Tensor, value: Tensor, heads: bool = False) -> Tensor:
    """Attend with every sample's own query to the same keys and values."""
    count = len(query)
    parts = [query[:, None], *(one.expand(count, 1, *one.shape) for one in (key, value))]
    if heads:
        parts = [part.transpose(0, 1) for part in parts]
    found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
    return found.transpose(0, 1) if heads else found


def _losses(x: Tensor) -> Tensor:
    return functional.cross_entropy(x, torch.ones(len(x), dtype=torch.long, device=x.device), reduction="none")


def _places(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _sampled(x: Tensor) -> Tensor:
    grid = torch.tensor([[[-0.5, 0.25], [0.5, -0.5]]], device=x.device, dtype=x.dtype)
    return functional.grid_sample(x, grid.expand(len(x), 1, 2, 2), align_corners=True)


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    zeros = torch.zeros(x.shape[1], device=x.device, dtype=x.dtype)
    return functional.batch_norm(x, zeros, zeros + 1, weight, bias)


def _apart(x: Tensor) -> Tensor:
    """Return samples whose numbers differ from one another, and are as exact."""
    return x + torch.arange(x[0].numel(), device=x.device, dtype=x.dtype).view(x.shape[1:]) / 64


_IMAGE, _LINE = (2, 3, 4), (2, 6)
CALLS: Mapping[str, Calls] = {
    "linear": Calls(functional.linear, (5,), ((3, 5), (3,))),
    "matmul": Calls(torch.matmul, (2, 5), ((5, 3),)),
    "bmm": Calls(lambda x, w: torch.bmm(x, w.expand(len(x), 5, 3)), (2, 5), ((5, 3),)),
    "bilinear": Calls(lambda x, w: functional.bilinear(x, x, w), (3,), ((2, 3, 3),)),
    "conv1d": Calls(partial(functional.conv1d, padding=1), _LINE, ((3, 2, 3), (3,))),
    "conv2d": Calls(functional.conv2d, _IMAGE, ((3, 2, 2, 2), (3,))),
    "depthwise conv2d": Calls(partial(functional.conv2d, groups=2), _IMAGE, ((2, 1, 2, 2), (2,))),
    "conv_transpose1d": Calls(partial(functional.conv_transpose1d, stride=2), _LINE, ((2, 3, 2), (3,))),
    "attention": Calls(_attention, (2, 8), ((3, 8), (3, 8))),
    "attention of heads": Calls(partial(_attention, heads=True), (2, 8), ((3, 8), (3, 8))),
    "softmax": Calls(partial(torch.softmax, dim=1), (5,)),
    "log_softmax of channels": Calls(partial(torch.log_softmax, dim=1), (3, 2)),
    "cross_entropy": Calls(_losses, (5,)),
    "layer_norm": Calls(lambda x, w, b: functional.layer_norm(x, (5,), w, b), (5,), ((5,), (5,))),
    "rms_norm": Calls(lambda x, w: functional.rms_norm(x, (5,), w, 1e-5), (5,), ((5,),)),
    "group_norm": Calls(lambda x, w, b: functional.group_norm(x, 2, w, b), (4, 3), ((4,), (4,))),
    "instance_norm": Calls(functional.instance_norm, (2, 5)),
    "batch_norm in inference": Calls(_normed, (2, 3), ((2,), (2,))),
    "normalize": Calls(functional.normalize, (5,)),
    "max_pool1d": Calls(lambda x: functional.max_pool1d(_apart(x), 2), _LINE),
    "max_pool2d": Calls(lambda x: functional.max_pool2d(_apart(x), 2), _IMAGE),
    "avg_pool2d": Calls(partial(functional.avg_pool2d, kernel_size=2, stride=1), _IMAGE),
    "adaptive_avg_pool2d": Calls(partial(functional.adaptive_avg_pool2d, output_size=2), _IMAGE),
    "interpolate": Calls(partial(functional.interpolate, scale_factor=2, mode="nearest"), _IMAGE),
    "interpolate, bilinear": Calls(partial(functional.interpolate, size=(5, 3), mode="bilinear"), _IMAGE),
    "pad": Calls(partial(functional.pad, pad=(1, 1), mode="reflect"), _LINE),
    "grid_sample": Calls(_sampled, _IMAGE),
    "pixel_shuffle": Calls(partial(functional.pixel_shuffle, upscale_factor=2), (4, 2, 2)),
    "unfold": Calls(partial(functional.unfold, kernel_size=2), _IMAGE),
    "glu": Calls(partial(functional.glu, dim=1), (6,)),
    "prelu": Calls(functional.prelu, (3, 2), ((3,),)),
    "gelu": Calls(functional.gelu, (5,)),
    "mul by a row": Calls(lambda x, w: x * w, (5,), ((5,),)),
    "sum": Calls(partial(torch.sum, dim=1), (7, 2)),
    "amax": Calls(lambda x: _apart(x).amax(1), (7,)),
    "cumsum": Calls(partial(torch.cumsum, dim=1), (7,)),
    "var": Calls(partial(torch.var, dim=1), (7,)),
    "sort": Calls(lambda x: _apart(x).sort(1).values, (7,)),
    "topk": Calls(lambda x: _apart(x).topk(2, 1).values, (7,)),
    "rows": Calls(lambda x: x.index_select(0, _places(x)), (3,)),
    "embedding": Calls(lambda x: functional.embedding(_places(x), x), (3,)),
    "embedding_bag": Calls(lambda x: functional.embedding_bag(_places(x), x, _places(x), mode="sum"), (3,)),
    "index_add": Calls(lambda x: torch.zeros_like(x).index_add(0, _places(x), x), (3,)),
    "cat": Calls(lambda x, w: torch.cat((x, w.expand(len(x), 2)), 1), (3,), ((1, 2),)),
}


def chosen(count: int) -> Tensor:
    """Return the places of the first samples, of those around the 65,536th, and of the last."""
    places = [0, 1, LIMIT - 2, LIMIT - 1, LIMIT, LIMIT + 1, count - 2, count - 1]
    return torch.tensor(sorted(set(places)))


def drawn(calls: Calls, count: int, generator: torch.Generator) -> list[Tensor]:
    """Return samples and other operands of quarters from -2 to 2, none of which are 0, so that none is at a kink."""
    shapes = [(count, *calls.sample), *calls.others]
    made = [torch.randint(1, 9, shape, generator=generator) / 4 for shape in shapes]
    return [one * (torch.randint(0, 2, one.shape, generator=generator) * 2 - 1) for one in made]


def answers(call: Call, operands: Sequence[Tensor], incoming: Tensor) -> dict[str, Tensor]:
    """Return the result and the gradients by samples and others; `incoming` has a factor for each sample."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    result = call(*leaves)
    ramp = torch.arange(1, result[0].numel() + 1, device=result.device).view(result[0].shape) % 3 - 0.5
    shaped = incoming.to(result.device, result.dtype).reshape(-1, *[1] * (result.dim() - 1))
    gradients = torch.autograd.grad(result, leaves, shaped * ramp.to(result.dtype))
    names = ("the samples", *(f"operand {number}" for number in range(1, len(leaves))))
    return {
        "result": result.detach(),
        **{f"gradient by {name}": one for name, one in zip(names, gradients, strict=True)},
    }
