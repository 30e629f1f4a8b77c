"""Functions of a float32 activation that a product in the same region takes in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE, LARGE = 8, 100.0
"""Rows and columns; the magnitude of an activation, of which 16 bits keep no digit behind the point in bfloat16."""
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "product with itself": lambda h: h * h,
    "product with its rows turned": lambda h: h * h.flip(0),
    "quotient of neighbours": lambda h: h / (h.roll(1, 0).abs() + LARGE),
    "power": lambda h: h.abs() ** 1.5,
    "sin": torch.sin,
    "log": lambda h: h.abs().log(),
    "tanh": lambda h: torch.tanh(h / LARGE),
    "exp": lambda h: torch.exp(h / LARGE),
    "silu": lambda h: F.silu(h / LARGE),
    "layer_norm": lambda h: F.layer_norm(h, (SIZE,)),
}


def program(device_type: str, dtype: torch.dtype) -> Callable[..., list[Tensor]]:
    """Return a program that gives each function of an activation of its own, and the product that takes it too."""

    def run(weight: Tensor, *leaves: Tensor) -> list[Tensor]:
        results = []
        for function, leaf in zip(FUNCTIONS.values(), leaves, strict=True):
            with torch.autocast(device_type, dtype=dtype):
                activation = leaf * LARGE
                product = activation @ weight
            results += [function(activation), product]
        return results

    return run


def gradients(run: Callable[..., list[Tensor]], weight: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Return by function the gradient of its results, each column with a weight of its own; products get zeros."""
    leaves = [x.clone().requires_grad_() for _ in FUNCTIONS]
    results = run(weight, *leaves)
    columns = torch.arange(1.0, SIZE + 1, device=x.device).repeat(SIZE, 1)
    incoming = [columns if at % 2 == 0 else torch.zeros_like(one) for at, one in enumerate(results)]
    return dict(zip(FUNCTIONS, torch.autograd.grad(results, leaves, incoming), strict=True))
