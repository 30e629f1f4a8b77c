"""Functions that have a kink, a bound or a pole, and the numbers there and beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

SECOND = 0.7
"""A bound that is rounded down to bfloat16, and up to float16."""

POINTS = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, torch.inf, -torch.inf)
"""Bounds of the functions, and infinities."""

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
    "elu": lambda x: F.elu(x, 0.5),
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
    "threshold of a larger value": lambda x: F.threshold(x, -1.0, 6.0),
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "clamp from below": lambda x: x.clamp(min=0.5),
    "clamp to a tensor": lambda x: x.clamp(max=x.new_ones(())),
    "hardtanh between numbers": lambda x: F.hardtanh(x, -SECOND, SECOND),
    "clamp between numbers": lambda x: x.clamp(-SECOND, SECOND),
    "clip from above, between numbers": lambda x: x.clip(max=SECOND),
    "abs": torch.abs,
    "sign": torch.sign,
    "maximum": lambda x: torch.maximum(x, x.new_ones(())),
    "minimum": lambda x: torch.minimum(x.new_zeros(()), x),
    "amax of equal ones": lambda x: torch.stack([x, x.new_ones(()).expand_as(x), x]).amax(0),
    "max of equal ones": lambda x: torch.stack([x, x.new_ones(()).expand_as(x), x]).max(0)[0],
    "where": lambda x: torch.where(x > 0.5, 2 * x, -x),
    "l1_loss": lambda x: F.l1_loss(x, x.new_ones(()).expand_as(x), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, x.new_zeros(()).expand_as(x), reduction="none", delta=2.0),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x.new_full((), -1.0).expand_as(x), reduction="none"),
    "product with zero": lambda x: x * 0,
    "addmm without what it is added to": lambda x: torch.addmm(x, x.new_ones(1, 3), x.new_ones(3, x.numel()), beta=0),
    "addmm without its product": lambda x: torch.addmm(x.new_ones(3), x.view(1, -1), x.new_ones(x.numel(), 3), alpha=0),
    "square root": lambda x: x.sqrt(),
    "power": lambda x: x**2.0,
    "reciprocal": torch.reciprocal,
    "logarithm": torch.log,
    "norm": lambda x: torch.linalg.vector_norm(x.view(-1, 1), dim=1),
}


LIMIT = 0.1
"""A bound that no 16-bit type holds."""

SIDES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "threshold between numbers": lambda x: F.threshold(x, LIMIT, 7.0),
    "hardshrink between numbers": lambda x: F.hardshrink(x, LIMIT),
    "where between numbers": lambda x: torch.where(x > LIMIT, x, 7.0),
    "masked_fill between numbers": lambda x: x.masked_fill(x > LIMIT, 7.0),
}
"""Functions that keep a number on one side of the bound, with a gradient of 1, and replace it on the other."""


def points(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each point and its neighbours of this type."""
    exact = torch.tensor((*POINTS, LIMIT, -LIMIT, SECOND, -SECOND), dtype=torch.float64)
    step = torch.finfo(dtype).eps
    return torch.cat([exact, exact * (1 + step), exact * (1 - step)]).to(device, dtype)
