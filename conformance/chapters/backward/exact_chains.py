"""Compute the chains of ops in float64 from elementwise products and sums, without matmul and convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...oracles.numbers.exact import convolution, product, transposed_convolution

Tensors = Mapping[str, torch.Tensor]


EXACT: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "linear": lambda t: product(t["x"], t["weight"].T) + t["bias"],
    "mm": lambda t: product(t["x"], t["weight"]),
    "matmul": lambda t: product(t["x"], t["weight"]),
    "bmm": lambda t: product(t["x"], t["weight"]),
    "addmm": lambda t: product(t["x"], t["weight"]) + t["bias"],
    "baddbmm": lambda t: product(t["x"], t["weight"]) + t["bias"],
    "conv1d": lambda t: convolution(t["x"], t["weight"], t["bias"], padding=1),
    "conv2d": lambda t: convolution(t["x"], t["weight"], t["bias"], stride=2),
    "conv2d-channels-last": lambda t: convolution(t["x"], t["weight"], t["bias"], stride=2),
    "conv_transpose2d": lambda t: transposed_convolution(t["x"], t["weight"], t["bias"], stride=2),
    "shared-weight": lambda t: product(product(t["x"], t["weight"].T), t["weight"].T),
    "to-loss": lambda t: (product(t["x"], t["weight"].T) + t["bias"] - t["goal"]).square().sum(),
}
"""By the chain's name: its output from float64 leaves, differentiable. Chains with a kink or with numbers that
16 bit cannot hold are left out."""
