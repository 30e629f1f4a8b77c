"""Matrix products that autocast runs in 16 bits, their operands and their float64 results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...oracles.numbers import exact
from .matmul_spellings import integers


@dataclass(frozen=True)
class Product:
    """An op that autocast runs in 16 bits and that multiplies (..., m, k) by (..., k, n), plus a bias for some."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    batch: tuple[int, ...] = ()
    bias: str = "none"
    vector: bool = False
    """n is 1: a matrix times a vector."""

    def operands(self, m: int, k: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of left, right and bias."""
        n = 1 if self.vector else n
        bias = {"none": (1,), "row": (n,), "full": (*self.batch, m, n)}[self.bias]
        return (*self.batch, m, k), (*self.batch, k, n), bias

    def expected(self, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
        result = exact.product(left, right)
        return result if self.bias == "none" else result + bias.double()


PRODUCTS = {
    "mm": Product(lambda left, right, bias: torch.mm(left, right)),
    "matmul": Product(lambda left, right, bias: left @ right),
    "linear": Product(lambda left, right, bias: F.linear(left, right.t(), bias), bias="row"),
    "bmm": Product(lambda left, right, bias: torch.bmm(left, right), batch=(3,)),
    "addmm": Product(lambda left, right, bias: torch.addmm(bias, left, right), bias="full"),
    "baddbmm": Product(lambda left, right, bias: torch.baddbmm(bias, left, right), batch=(2,), bias="full"),
    "broadcast": Product(lambda left, right, bias: torch.matmul(left, right), batch=(2, 3)),
    "mv": Product(lambda left, right, bias: torch.matmul(left, right.squeeze(-1)).unsqueeze(-1), vector=True),
    "transposed": Product(lambda left, right, bias: torch.mm(left.t().contiguous().t(), right.t().contiguous().t())),
}


# No dimension is a multiple of a vector or a tile, some are 1; the last one is what tiles are made for.
SHAPES = ((7, 33, 5), (1, 127, 9), (31, 257, 1), (3, 1, 5), (1, 5, 1), (64, 64, 64))


def cancelling_integers(
    rng: torch.Generator, product: Product, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return integer operands whose partial sums reach tens of thousands and whose results stay within 209.

    [X, X + D, E] times [Y; -Y; Z] is EZ - DY, D having one 1 in a row: both types hold every operand (up to 101)
    and result exactly (bf16 holds integers up to 256), none holds the sums on the way, and fp32 holds all of them
    (below 2^24), in any order.
    """
    (*batch, m, k), (*_, n), bias = product.operands(*shape)
    half = (k - 1) // 2
    x, y = integers(rng, 100, *batch, m, half), integers(rng, 100, *batch, half, n)
    rest = k - 2 * half
    if half:
        place = torch.randint(0, half, (*batch, m, 1), generator=rng)
        other = x.scatter_add(-1, place, torch.ones(place.shape))
        x, y = torch.cat([x, other], -1), torch.cat([y, -y], -2)
    left = torch.cat([x, integers(rng, 5, *batch, m, rest)], -1)
    right = torch.cat([y, integers(rng, 5, *batch, rest, n)], -2)
    order = torch.randperm(k, generator=rng)
    return left[..., order], right[..., order, :], integers(rng, 20, *bias)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right' in float64."""
    return exact.product(left, right.mT)


def gaussians(rng: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=rng) for shape in shapes]


def worst_ratio(seen: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Return the greatest ratio of an error to its own bound."""
    return float(((seen.detach().cpu().double() - expected).abs() / bound).max())
