"""Compute ops in float64 from additions and multiplications, without the kernel of the op itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...oracles.numbers.exact import convolution, layer_norm, product, transposed_convolution


def time_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve (T, B, C) with (K, C, O) over the first dimension (torch.conv_tbc, no padding)."""
    length = len(x) - len(weight) + 1
    return sum((product(x[k : k + length], step) for k, step in enumerate(weight)), start=bias)


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute exp(x - max) over its sum."""
    powers = elementwise(math.exp)(x - x.amax(dim, keepdim=True))
    return powers / _sum(powers, dim, keepdim=True)


def elementwise(function: Callable[..., float]) -> Callable[..., torch.Tensor]:
    """Apply a function of Python's math module to every element of the first argument, and of the others like it."""

    def apply(x: torch.Tensor, *others: torch.Tensor | float) -> torch.Tensor:
        columns = [x, *(other if isinstance(other, torch.Tensor) else torch.full_like(x, other) for other in others)]
        values = [function(*row) for row in zip(*(column.flatten().tolist() for column in columns), strict=True)]
        return torch.tensor(values, dtype=torch.float64, device=x.device).reshape(x.shape)

    return apply


def transform(x: torch.Tensor) -> torch.Tensor:
    """Compute the discrete Fourier transform over the last dimension, by its definition (torch.fft.fft)."""
    count = x.shape[-1]
    angles = [[-2 * math.pi * ((row * column) % count) / count for column in range(count)] for row in range(count)]
    waves = [
        torch.tensor([[f(angle) for angle in row] for row in angles], dtype=torch.float64) for f in (math.cos, math.sin)
    ]
    return torch.complex(*(product(x, wave.to(x.device)) for wave in waves))


def _sum(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    total = x.unbind(dim)[0]
    for part in x.unbind(dim)[1:]:
        total = total + part
    return total.unsqueeze(dim) if keepdim else total


def _prod(x: torch.Tensor, dim: int) -> torch.Tensor:
    total = x.unbind(dim)[0]
    for part in x.unbind(dim)[1:]:
        total = total * part
    return total


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    return _sum(apart * apart, -1) ** 0.5


# By the key of the sample in SAMPLES; each takes the arguments of the sample call, in float64.
REFERENCES: dict[str, Callable[..., Any]] = {
    "__matmul__": product,
    "matmul": product,
    "mm": product,
    "bmm": product,
    "mv": lambda a, v: product(a, v.unsqueeze(-1)).squeeze(-1),
    "einsum": lambda _, a, b: product(a, b),
    "addmm": lambda c, a, b, beta, alpha: beta * c + alpha * product(a, b),
    "addmv": lambda c, a, v: c + product(a, v.unsqueeze(-1)).squeeze(-1),
    "addr": lambda c, u, v: c + u.unsqueeze(-1) * v,
    "addbmm": lambda c, a, b: c + _sum(product(a, b), 0),
    "baddbmm": lambda c, a, b: c + product(a, b),
    "linalg_vecdot": lambda a, b: _sum(a * b, -1),
    "linear": lambda x, w, b: product(x, w.T) + b,
    "linear.plain": lambda x, w: product(x, w.T),
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv1d.padding": convolution,
    "conv2d.padding": convolution,
    "conv3d.padding": convolution,
    "_convolution": lambda x, w, b, _stride, padding, *_rest: convolution(x, w, b, padding=padding[0]),
    "conv_tbc": time_convolution,
    "conv_transpose1d": transposed_convolution,
    "conv_transpose2d": transposed_convolution,
    "conv_transpose3d": transposed_convolution,
    "exp": elementwise(math.exp),
    "expm1": elementwise(math.expm1),
    "log": elementwise(math.log),
    "log1p": elementwise(math.log1p),
    "log2": elementwise(math.log2),
    "log10": elementwise(math.log10),
    "acos": elementwise(math.acos),
    "asin": elementwise(math.asin),
    "cosh": elementwise(math.cosh),
    "sinh": elementwise(math.sinh),
    "tan": elementwise(math.tan),
    "pow": elementwise(math.pow),
    "pow.scalar": elementwise(math.pow),
    "pow.base": lambda base, x: elementwise(lambda exponent: math.pow(base, exponent))(x),
    "reciprocal": elementwise(lambda x: 1 / x),
    "rsqrt": elementwise(lambda x: 1 / math.sqrt(x)),
    "sum": _sum,
    "sum.all": lambda x: _sum(x.flatten(), 0),
    "prod": _prod,
    "prod.all": lambda x: _prod(x.flatten(), 0),
    "trace": lambda x: _sum(x.diagonal(), 0),
    "cdist": _distances,
    "softmax": softmax,
    "layer_norm": lambda x, _, w, b: layer_norm(x) * w + b,
    "mse_loss": lambda x, y: _sum(((x - y) * (x - y)).flatten(), 0) / x.numel(),
    "l1_loss": lambda x, y: _sum(torch.where(x > y, x - y, y - x).flatten(), 0) / x.numel(),
    "polar": lambda r, angle: torch.complex(r * elementwise(math.cos)(angle), r * elementwise(math.sin)(angle)),
    "fft_fft": transform,
}
