"""Products in 16 bits that are combined with a float32 tensor of large numbers, and the exact results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Pairs: TypeAlias = tuple[tuple[str, str], ...]
Combination: TypeAlias = Callable[[Tensor, Tensor], Tensor]

SIZE = 8
_SQUARE = ((SIZE, SIZE), (SIZE, SIZE))

PRODUCTS: Mapping[str, tuple[Product, tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, _SQUARE),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), _SQUARE),
    "linear": (functional.linear, _SQUARE),
    "linear with a bias": (lambda x, w: functional.linear(x, w, w[0]), _SQUARE),
    "bmm": (torch.bmm, ((2, SIZE, SIZE), (2, SIZE, SIZE))),
    "conv2d": (functional.conv2d, ((2, SIZE, 3, 3), (SIZE, SIZE, 1, 1))),
}
"""Products by name, each with the shapes of its operands."""

COMBINED: Mapping[str, Combination] = {
    "product + wide": lambda product, wide: product + wide,
    "wide + product": lambda product, wide: wide + product,
    "product - wide": lambda product, wide: product - wide,
    "wide - product": lambda product, wide: wide - product,
    "product * wide": lambda product, wide: product * wide,
    "wide * product": lambda product, wide: wide * product,
    "wide row + product": lambda product, wide: wide[:1] + product,
    "wide.add_(product)": lambda product, wide: wide.clone().add_(product),
    "wide.add(product, alpha)": lambda product, wide: wide.add(product, alpha=0.5),
}
"""What is made of a product and of a float32 tensor of its shape, by name."""

ALL: Pairs = tuple(itertools.product(PRODUCTS, COMBINED))

SUMS = (("mm", "product + wide"), ("mm", "wide + product"), ("linear", "wide + product"), ("bmm", "product + wide"))
"""The pairs of which the passes of a compiler make one op."""


def operands(name: str, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands of a product that is exact in 16 bits, however it is summed, and numbers that need 24 bits."""
    product, shapes = PRODUCTS[name]
    # Sums of at most 9 terms of size 1 are integers below 2**8.
    x, w = (torch.randint(-1, 2, shape, generator=generator).float() for shape in shapes)
    wide = 100 * (torch.rand(product(x, w).shape, generator=generator) + 1)
    return x.to(device), w.to(device), wide.to(device)


def combine(pairs: Pairs, given: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Return the combination of each pair, on its own operands: a product that two results share is not fused."""
    found = []
    for (name, how), (x, w, wide) in zip(pairs, given, strict=True):
        found.append(COMBINED[how](PRODUCTS[name][0](x, w), wide))
    return found
