"""Functions that torch.jit.script takes as they are: it reads their source, and a region's arguments are constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional


def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply outside of any region of its own."""
    return torch.mm(x, w), functional.linear(x, w)


def region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply in a region and after it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
    return y, torch.mm(x, w)


def island(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply in a region, in a disabled one inside it, and after that."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        with torch.autocast("cpu", enabled=False):
            z = torch.mm(y.float(), w)
        u = torch.mm(z, w)
    return y, z, u


def addmm(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.addmm(x, x, w)


def relu(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.relu(torch.mm(x, w))


def softmax(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.softmax(torch.mm(x, w), 1)


def mse_loss(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.mse_loss(torch.mm(x, w), torch.mm(w, x))


def cat(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([torch.mm(x, w), x])


def exp(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.exp(torch.mm(x, w))


def total(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.sum(torch.mm(x, w))


def gelu(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.gelu(torch.mm(x, w))


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.layer_norm(torch.mm(x, w), [2])


def einsum(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.einsum("ij,jk->ik", x, w)


def attention(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.scaled_dot_product_attention(x[None], x[None], w[None])


REGIONS: Mapping[str, Callable[..., object]] = {one.__name__: one for one in (region, island)}
OPS: Mapping[str, Callable[..., object]] = {
    one.__name__: one for one in (addmm, relu, softmax, mse_loss, cat, exp, total, gelu, layer_norm, einsum, attention)
}
