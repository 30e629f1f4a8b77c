"""The chains of ops in float64, from elementwise products and sums: no matrix product, no convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply (..., n, k) by (..., k, m); exact on integers whose sums stay below 2^53."""
    return (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: int) -> torch.Tensor:
    """Convolve (N, C, H, W) with (O, C, kH, kW) without padding: every patch times every kernel."""
    size = weight.shape[2:]
    height, width = ((extent - kernel) // stride + 1 for extent, kernel in zip(x.shape[2:], size, strict=True))
    patches = functional.unfold(x, size, stride=stride)
    out = product(weight.flatten(1), patches) + bias.unsqueeze(1)
    return out.view(len(x), -1, height, width)


def transposed_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: int) -> torch.Tensor:
    """Spread every element of (N, C, H, W) over a patch through (C, O, kH, kW), and add the patches up."""
    size = weight.shape[2:]
    patches = product(weight.flatten(1).T, x.flatten(2))
    area = [(extent - 1) * stride + kernel for extent, kernel in zip(x.shape[2:], size, strict=True)]
    return functional.fold(patches, area, size, stride=stride) + bias.view(-1, 1, 1)


def _conv1d(t: Tensors) -> torch.Tensor:
    flat = functional.pad(t["x"], (1, 1)).unsqueeze(2)
    return convolution(flat, t["weight"].unsqueeze(2), t["bias"], 1).squeeze(2)


EXACT: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "linear": lambda t: product(t["x"], t["weight"].T) + t["bias"],
    "mm": lambda t: product(t["x"], t["weight"]),
    "matmul": lambda t: product(t["x"], t["weight"]),
    "bmm": lambda t: product(t["x"], t["weight"]),
    "addmm": lambda t: product(t["x"], t["weight"]) + t["bias"],
    "baddbmm": lambda t: product(t["x"], t["weight"]) + t["bias"],
    "conv1d": _conv1d,
    "conv2d": lambda t: convolution(t["x"], t["weight"], t["bias"], 2),
    "conv2d-channels-last": lambda t: convolution(t["x"], t["weight"], t["bias"], 2),
    "conv_transpose2d": lambda t: transposed_convolution(t["x"], t["weight"], t["bias"], 2),
    "shared-weight": lambda t: product(product(t["x"], t["weight"].T), t["weight"].T),
    "to-loss": lambda t: (product(t["x"], t["weight"].T) + t["bias"] - t["goal"]).square().sum(),
}
"""By the chain's name: its output from float64 leaves, differentiable. Chains with a kink or with numbers that
16 bit cannot hold are left out."""
