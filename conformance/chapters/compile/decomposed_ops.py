"""Ops that compilers take apart, each on a 16-bit tensor of its own whose rows are long or whose numbers are large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) % x.shape[1]


def _goal(x: Tensor) -> Tensor:
    return (0.75 * x.detach()).flip(-1)


OPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, list(x.shape[1:]), eps=1e-5),
    "group_norm": lambda x: F.group_norm(x[None], 1),
    "batch_norm": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "gelu": F.gelu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "glu": F.glu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "logsigmoid": F.logsigmoid,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean beyond the range": lambda x: (x.abs() * 8).mean(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm of all": torch.linalg.vector_norm,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "mse_loss": lambda x: F.mse_loss(x, _goal(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, _goal(x)),
    "huber_loss": lambda x: F.huber_loss(x, _goal(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, _labels(x)),
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], 4),
}

SHAPES: Mapping[str, tuple[tuple[int, int], float, float]] = {
    "long rows": ((2, 4096), 1.0, 0.0),
    "large numbers": ((4, 64), 500.0, 0.0),
    "far from zero": ((8, 256), 1.0, 30.0),
}
"""The shape of the operands, the deviation of their numbers, and their mean.

Squares of the large ones are beyond float16's range, and means of those far from zero are rounded by as much as they
deviate.
"""
FAR_FROM_ZERO = tuple(
    name for name in OPS if "norm" in name or name in ("var", "std", "mean", "softmax", "log_softmax")
)
"""The ops that take those far from zero: of activations these say nothing."""
SATURATED = ("softmax",)
"""The ops whose result on large numbers is one and zeros, and whose gradient, a difference of ones, is what is left."""


KEEP_THEIR_RESULT = ("sigmoid", "tanh")
"""The ops whose gradient is computed from their rounded result, which costs more than to round the gradient."""


def operand(name: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return the operand of every op in a 16-bit dtype, without the numbers at which a derivative jumps."""
    shape, deviation, mean = SHAPES[name]
    x = (mean + torch.randn(shape, generator=generator) * deviation).to(dtype)
    at_a_kink = (x == 0) | (x.abs() == 3)  # of abs and hardswish: either derivative is right there
    return torch.where(at_a_kink, x + 0.0625, x).to(device)


def every(names: Sequence[str], *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the result of each of these ops on its operand."""
    return tuple(OPS[name](x) for name, x in zip(names, operands, strict=True))


def every_rounded(names: Sequence[str], dtype: torch.dtype, *operands: Tensor) -> tuple[Tensor, ...]:
    """Do as `every` in float64, but round to a 16-bit dtype what is kept for backward."""

    def rounded(kept: Tensor) -> Tensor:
        return kept.to(dtype).to(kept.dtype) if kept.is_floating_point() else kept

    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda kept: kept):
        return every(names, *operands)


def results(
    names: Sequence[str], call: Callable[..., Sequence[Tensor]], x: Tensor, *, far: bool = False
) -> dict[str, Tensor]:
    """Return outputs and gradients of these ops, from a call like `every`, each op on a copy of `x`.

    The cotangents differ from element to element: of a constant one a normalization has no gradient. For operands
    `far` from zero they add up to nearly nothing along each dimension: a CPU keeps the mean of a normalization in 16
    bits for backward, and the error of that mean, as large as the deviation, is multiplied by the mean cotangent.
    """
    leaves = [x.detach().clone().requires_grad_() for _ in names]
    outputs = call(*leaves)
    weights = _alternating if far else _weights
    losses = [(one.cpu().double() * weights(one)).sum() for one in outputs]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), leaves)
    found: dict[str, Tensor] = {name: one.detach() for name, one in zip(names, outputs, strict=True)}
    return found | {f"gradient of {name}": one for name, one in zip(names, gradients, strict=True)}


def _weights(output: Tensor) -> Tensor:
    count: Any = output.numel()
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64).reshape(output.shape)


def _alternating(output: Tensor) -> Tensor:
    count: Any = output.numel()
    odd = torch.ones(output.shape).nonzero().sum(-1) % 2
    return ((1 - 2 * odd) * torch.linspace(1.0, 2.0, count, dtype=torch.float64)).reshape(output.shape)


def error(found: Tensor, exact: Tensor) -> float:
    """Return the largest error of an element, relative to the largest element."""
    return float((found.cpu().double() - exact).abs().max() / exact.abs().max())


def allowed(name: str) -> float:
    """Return by how many units of roundoff a result may be farther from the exact one than eager's.

    Its parts are in float32, so that it is rounded once, and an eighth is for the parts. A CPU keeps the mean and the
    deviation of a normalization in 16 bits for backward, and either may be rounded to the neighbour of eager's. A loss
    of classes adds up what log_softmax and nll_loss give in 16 bits, twice where it is smoothed.
    """
    if name.startswith("gradient of "):
        return 5.125 if "_norm" in name else 1.125
    return 3.125 if name.startswith("cross_entropy") else 1.125
