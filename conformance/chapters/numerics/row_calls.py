"""Calls on rows of any length, with a weight for each place of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# Of rows, one or more, and of a weight as long as one.
Call: TypeAlias = Callable[[Tensor, Tensor], Tensor]
LAYOUTS = ("as given", "behind one element", "turned")


class Kind(NamedTuple):
    """A call, and from which length on its gradients are no differences of nearly equal numbers."""

    call: Call
    from_length: int = 1


def _table(weight: Tensor) -> Tensor:
    """Return the weight and two others as rows, in any length without rounding.

    Its gradient is the sum of three, which may cancel in each of one or two elements, but not in many.
    """
    return torch.stack((weight, weight.flip(0), -weight))


def _windows(x: Tensor, weight: Tensor) -> Tensor:
    taps = weight[torch.tensor([0, len(weight) // 2, len(weight) - 1], device=weight.device)]
    return functional.conv1d(x[:, None], taps[None, None], padding=1)


def _places(x: Tensor, weight: Tensor) -> Tensor:
    return x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)) + weight


def _bins(x: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device), x * weight)


REDUCTIONS: Mapping[str, Kind] = {
    "sum": Kind(lambda x, w: x.sum(1)),
    "sum of columns": Kind(lambda x, w: (x * w).sum(0)),
    "mean": Kind(lambda x, w: x.mean(1)),
    "amax": Kind(lambda x, w: x.amax(1)),
    "min": Kind(lambda x, w: x.min(1).values),
    "logsumexp": Kind(lambda x, w: x.logsumexp(1)),
    "var": Kind(lambda x, w: x.var(1, correction=0), 4),
    "vector_norm": Kind(lambda x, w: torch.linalg.vector_norm(x, dim=1)),
    "cumsum": Kind(lambda x, w: x.cumsum(1)),
    "sort": Kind(lambda x, w: x.sort(1).values),
    "mse_loss": Kind(lambda x, w: functional.mse_loss(x, w.expand_as(x))),
    "avg_pool1d": Kind(lambda x, w: functional.avg_pool1d(x[:, None], 3, 1, 1)),
    "max_pool1d": Kind(lambda x, w: functional.max_pool1d(x[:, None], 3, 1, 1)),
}
# Times a quarter, which is exact, nothing is saturated: gradients there are of rounding errors alone.
NORMALIZATIONS: Mapping[str, Kind] = {
    "softmax": Kind(lambda x, w: (x * 0.25).softmax(1), 16),
    "softmax of columns": Kind(lambda x, w: (x * 0.25).t().softmax(0), 16),
    "log_softmax": Kind(lambda x, w: (x * 0.25).log_softmax(1), 16),
    "layer_norm": Kind(lambda x, w: functional.layer_norm(x, x.shape[1:], w, w.flip(0)), 16),
    "rms_norm": Kind(lambda x, w: functional.rms_norm(x, x.shape[1:], w, 1e-5), 16),
    "group_norm": Kind(
        lambda x, w: functional.group_norm(x[:, None].expand(-1, 2, -1), 1, w[:1].expand(2), w[-1:].expand(2)), 16
    ),
    "normalize": Kind(lambda x, w: functional.normalize(x, dim=1), 16),
}
ELEMENTWISE: Mapping[str, Kind] = {
    "mul": Kind(lambda x, w: x * w),
    "add": Kind(lambda x, w: torch.add(x, w, alpha=2)),
    "addcmul": Kind(lambda x, w: torch.addcmul(x, x, w.expand_as(x), value=0.5)),
    "lerp": Kind(lambda x, w: torch.lerp(x, w.expand_as(x), 0.25)),
    "where": Kind(lambda x, w: torch.where(x > 0, x, w)),
    "clamp": Kind(lambda x, w: x.clamp(-1.1, 1.6)),
    "gelu": Kind(lambda x, w: functional.gelu(x)),
    "silu": Kind(lambda x, w: functional.silu(x)),
    "sigmoid": Kind(lambda x, w: (x * 0.25).sigmoid()),
    "tanh": Kind(lambda x, w: (x * 0.25).tanh()),
    "exp": Kind(lambda x, w: x.exp()),
    "copy": Kind(lambda x, w: x.float() * 2),
    "cat": Kind(lambda x, w: torch.cat((x, w[None], x))),
    "index_select": Kind(_places),
    "index_add": Kind(_bins),
}
PRODUCTS: Mapping[str, Kind] = {
    "mv": Kind(lambda x, w: x @ w),
    "linear": Kind(lambda x, w: functional.linear(x, _table(w)), 4),
    "linear with a bias": Kind(lambda x, w: functional.linear(x, _table(w), w[:1].expand(3)), 4),
    "mm": Kind(lambda x, w: x @ _table(w).t().contiguous(), 4),
    "mm of columns": Kind(lambda x, w: x.t() @ x),
    "bmm": Kind(lambda x, w: torch.bmm(x.expand(2, *x.shape), _table(w).mT.expand(2, -1, -1)), 4),
    "einsum": Kind(lambda x, w: torch.einsum("rl,l->r", x, w)),
    "conv1d": Kind(_windows, 3),
    "convolution of whole rows": Kind(lambda x, w: functional.conv1d(x[:, None], _table(w)[:, None]), 4),
    "attention": Kind(
        lambda x, w: functional.scaled_dot_product_attention(
            x[None, None] * 0.25, _table(w)[None, None], _table(w)[None, None]
        ),
        16,
    ),
}
FAMILIES = {
    "reductions": REDUCTIONS,
    "normalizations": NORMALIZATIONS,
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
}


def rows(rng: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, a weight and the numbers that a gradient comes in with, whose ends and one more place stand out.

    All are quarters, which every type holds. A result without one of these places is far from the result.
    """
    x, weight, incoming = (
        torch.randint(-6, 7, size, generator=rng) / 4 for size in ((count, length), (length,), (131,))
    )
    place = int(torch.randint(length, (), generator=rng))
    x[:, -1] += 3
    x[:, place] += 2
    x[-1] += 1
    weight[-1] = 2.5
    weight[place] += 1
    incoming[::3] += 1
    return x, weight, incoming


def laid(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers, which lie in memory otherwise, as a leaf."""
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "turned":
        x = x.t().contiguous().t()
    elif layout == "behind one element":
        x = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x.detach().requires_grad_()


def answers(call: Call, x: Tensor, weight: Tensor, incoming: Tensor) -> list[Tensor]:
    """Return the result and the gradients of rows and weight, where there are any."""
    result = call(x, weight)
    count = result.numel()
    seed = incoming.repeat(-(-count // len(incoming)))[:count].view(result.shape).to(result.dtype)
    gradients = torch.autograd.grad(result, (x, weight), seed, allow_unused=True)
    return [result.detach(), *(one for one in gradients if one is not None)]
