"""Second derivatives of ops in 16 bits, each term of them alone, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Twice:
    """An op that is differentiated twice, and the shapes of its operands, all of which learn."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        return F.scaled_dot_product_attention(q, k, v, **options)


_X = ((5, 6),)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "glu": lambda x: F.glu(x, -1),
    "relu of a square": lambda x: F.relu(x).square(),
    "exp": torch.exp,
    "square": torch.square,
    "pow": lambda x: (x.square() + 1).pow(1.5),
    "rsqrt": lambda x: (x.square() + 1).rsqrt(),
    "log": lambda x: (x.square() + 1).log(),
    "sin": torch.sin,
    "erf": torch.erf,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "prod": lambda x: (x.square() + 0.5).prod(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}
_OTHERS: dict[str, Twice] = {
    "prelu": Twice(F.prelu, ((5, 6), (1,))),
    "mul": Twice(torch.mul, ((5, 6), (6,))),
    "div": Twice(lambda x, y: x / (y.square() + 1), ((5, 6), (6,))),
    "mm": Twice(torch.mm, ((5, 6), (6, 4))),
    "bmm": Twice(torch.bmm, ((2, 5, 6), (2, 6, 4))),
    "addmm": Twice(torch.addmm, ((5, 4), (5, 6), (6, 4))),
    "linear": Twice(F.linear, ((5, 6), (4, 6), (4,))),
    "bilinear": Twice(F.bilinear, ((5, 3), (5, 4), (2, 3, 4), (2,))),
    "conv1d": Twice(F.conv1d, ((2, 3, 7), (4, 3, 3), (4,))),
    "conv2d": Twice(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), ((2, 3, 5, 5), (4, 3, 3, 3), (4,))),
    "conv2d of groups": Twice(lambda x, w: F.conv2d(x, w, groups=2, dilation=2), ((2, 4, 6, 6), (4, 2, 2, 2))),
    "conv3d": Twice(F.conv3d, ((1, 2, 3, 4, 4), (2, 2, 2, 2, 2), (2,))),
    "conv_transpose1d": Twice(F.conv_transpose1d, ((2, 3, 5), (3, 4, 3), (4,))),
    "conv_transpose2d": Twice(lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 3, 3, 3), (3, 2, 2, 2))),
    "layer_norm": Twice(lambda x, w, b: F.layer_norm(x, (6,), w, b), ((5, 6), (6,), (6,))),
    "group_norm": Twice(lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 6), (4,), (4,))),
    "rms_norm": Twice(lambda x, w: F.rms_norm(x, (6,), w, eps=1e-3), ((5, 6), (6,))),
    "attention": Twice(_attention, ((2, 5, 4), (2, 6, 4), (2, 6, 3))),
    "causal attention": Twice(lambda q, k, v: _attention(q, k, v, is_causal=True), ((2, 5, 4),) * 3),
    "mse_loss": Twice(F.mse_loss, ((5, 6), (5, 6))),
    "huber_loss": Twice(F.huber_loss, ((5, 6), (5, 6))),
    "cosine_similarity": Twice(F.cosine_similarity, ((5, 6), (5, 6))),
    "avg_pool2d": Twice(lambda x: F.avg_pool2d(x, 2).square(), ((2, 3, 4, 4),)),
    "interpolate": Twice(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").square(), ((2, 2, 3, 3),)),
}
TWICE: dict[str, Twice] = {name: Twice(call, _X) for name, call in _ACTIVATIONS.items()} | _OTHERS

Derivatives = dict[str, Tensor]


def derivatives(
    op: Twice, values: list[Tensor], rng: torch.Generator, region: Callable[[], AbstractContextManager[Any]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each term: of each first gradient, the gradient by each operand and by what came in.

    `values` are the operands; what comes in and the weights of the gradients are numbers of the generator.
    """
    leaves = [value.detach().requires_grad_() for value in values]
    with region():
        result = op.call(*leaves)
    incoming = _draw(result, rng).requires_grad_()
    first = torch.autograd.grad(result, leaves, incoming, create_graph=True)
    for number, slope in enumerate(first):
        if not slope.requires_grad:
            continue
        second = torch.autograd.grad(
            slope, [*leaves, incoming], _draw(slope, rng), retain_graph=True, allow_unused=True
        )
        for place, found in enumerate(second):
            by = "what comes in" if place == len(leaves) else f"operand {place}"
            yield f"gradient {number} by {by}", found if found is not None else torch.zeros(())


def _draw(like: Tensor, rng: torch.Generator) -> Tensor:
    """Return numbers that every 16-bit type has, so that both runs have the same."""
    signs = torch.randint(0, 2, like.shape, generator=rng) * 2 - 1  # of one sign, they cancel in a normalization
    return (torch.randint(4, 9, like.shape, generator=rng) * signs / 8).to(like.device, like.dtype)
