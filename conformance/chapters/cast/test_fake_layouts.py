"""Check that fake tensors have the layouts of the real ones, which compilers plan memory by."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

# Of pictures (2, 4, 8, 8) and a weight (6, 4, 3, 3).
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv1d": lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]),
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "conv2d, strided": lambda x, w: F.conv2d(x, w, stride=2),
    "conv2d, depthwise": lambda x, w: F.conv2d(x, w[:4, :1], groups=4),
    "conv2d of a channels-last weight": lambda x, w: F.conv2d(x, w.contiguous(memory_format=torch.channels_last)),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,)),
    "softmax": lambda x, w: F.softmax(x, 1),
    "gelu": lambda x, w: F.gelu(x),
    "relu": lambda x, w: F.relu(x),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "sum of two": lambda x, w: x + x.double(),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "stack": lambda x, w: torch.stack([x, x]),
    "pad": lambda x, w: F.pad(x, (1, 1, 1, 1)),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w: F.adaptive_avg_pool2d(x, 2),
    "interpolate, nearest": lambda x, w: F.interpolate(x, scale_factor=2),
    "interpolate, bilinear": lambda x, w: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda x, w: F.pixel_shuffle(x, 2),
    "matmul": lambda x, w: x.flatten(2) @ x.flatten(2).mT,
    "linear": lambda x, w: F.linear(x, w.flatten()[:24].view(3, 8)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "attention of transposed heads": lambda x, w: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3),
    "cast": lambda x, w: x.to(torch.float64),
    "sum of two layouts": lambda x, w: x + x.contiguous(),
    "product with a row": lambda x, w: x * x[:, :1],
    "where": lambda x, w: torch.where(x > 0, x, -x),
    "clamp": lambda x, w: x.clamp(-1, 1),
    "silu": lambda x, w: F.silu(x),
    "mean": lambda x, w: x.mean(1),
    "sum, kept": lambda x, w: x.sum((1, 2), keepdim=True),
    "largest": lambda x, w: x.amax(3),
    "cumsum": lambda x, w: x.cumsum(1),
    "repeat": lambda x, w: x.repeat(1, 2, 1, 1),
    "sort": lambda x, w: x.sort(1).values,
    "index_select": lambda x, w: x.index_select(1, x.new_tensor([0, 2], dtype=torch.long)),
    "avg_pool1d": lambda x, w: F.avg_pool1d(x[:, :, 0], 2),
    "instance_norm": lambda x, w: F.instance_norm(x),
}
# Of volumes (2, 4, 4, 6, 6) and a weight (6, 4, 3, 3, 3).
OPS_OF_VOLUMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conv3d": lambda x, w: F.conv3d(x, w, padding=1),
    "conv3d, strided": lambda x, w: F.conv3d(x, w, stride=2),
    "conv3d, depthwise": lambda x, w: F.conv3d(x, w[:4, :1], groups=4),
    "conv3d of a channels-last weight": lambda x, w: F.conv3d(x, w.contiguous(memory_format=torch.channels_last_3d)),
    "conv_transpose3d": lambda x, w: F.conv_transpose3d(x, w.transpose(0, 1), stride=2),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "softmax": lambda x, w: F.softmax(x, 1),
    "relu": lambda x, w: F.relu(x),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "pad": lambda x, w: F.pad(x, (1,) * 6),
    "max_pool3d": lambda x, w: F.max_pool3d(x, 2),
    "avg_pool3d": lambda x, w: F.avg_pool3d(x, 2),
    "adaptive_avg_pool3d": lambda x, w: F.adaptive_avg_pool3d(x, 2),
    "interpolate, nearest": lambda x, w: F.interpolate(x, scale_factor=2),
    "interpolate, trilinear": lambda x, w: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "cast": lambda x, w: x.to(torch.float64),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "channels in the middle": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every second column": lambda x: torch.cat([x, x], 3)[..., ::2],
}
LAYOUTS_OF_VOLUMES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.transpose(3, 4),
    "channels in the middle": lambda x: x.permute(0, 2, 1, 3, 4).contiguous().permute(0, 2, 1, 3, 4),
}

# By name the ops, the layouts and the shapes of what they take.
FORMS: dict[str, tuple[Any, ...]] = {
    "pictures": (OPS, LAYOUTS, (2, 4, 8, 8), (6, 4, 3, 3)),
    "volumes": (OPS_OF_VOLUMES, LAYOUTS_OF_VOLUMES, (2, 4, 4, 6, 6), (6, 4, 3, 3, 3)),
}


@contract("AMP-CAST-050", on="cpu")
@pytest.mark.parametrize("place", ["in", "outside"])
@pytest.mark.parametrize("form", ["pictures", deep("standard", "volumes")])
def test_fake_layouts(case: Case, target: Target, amp_dtype: torch.dtype, form: str, place: str) -> None:
    """Operands are 16-bit outside of a region, and float32 in one."""
    dtype = torch.float32 if place == "in" else amp_dtype
    compared = 0
    ops, layouts, *shapes = FORMS[form]
    x, weight = (torch.ones(shape, dtype=dtype) for shape in shapes)
    for (name, op), (layout, laid) in itertools.product(ops.items(), layouts.items()):
        given = laid(x), weight

        def call(*given: Tensor, op: Callable[[Tensor, Tensor], Tensor] = op) -> Tensor:
            with target.autocast(amp_dtype, enabled=place == "in"), torch.no_grad():
                return op(*given)

        try:
            real = call(*given)
        except (RuntimeError, NotImplementedError) as error:  # no kernel for these types
            case.note(f"{name}, {layout}: {amp_dtype} {place}", str(error).splitlines()[0][:80])
            continue
        with FakeTensorMode() as mode:
            fake = call(*map(functools.partial(mode.from_tensor, static_shapes=True), given))
        compared += 1
        seen, right = ((one.dtype, tuple(one.shape), one.stride()) for one in (fake, real))
        case.equal(f"{name}, {layout}: type, shape and strides", seen, right)
    case.at_least("results compared", compared, len(ops))
