"""Tensors of fp16, bf16 and fp32: of given bit patterns, and rounded without a cast to a narrow type."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .binary import BF16, FP16, FP32, Format, midpoints, narrow, widen

__all__ = [
    "BF16",
    "FORMATS",
    "FP16",
    "FP32",
    "OTHER",
    "Format",
    "binades",
    "midpoints",
    "narrow",
    "rounded",
    "tensor_of",
    "widen",
]

FORMATS = {form.dtype: form for form in (FP16, BF16, FP32)}
OTHER = {FP16.dtype: BF16.dtype, BF16.dtype: FP16.dtype}


def tensor_of(patterns: Iterable[int], form: Format) -> torch.Tensor:
    """Return a CPU tensor of `form.dtype` that has these bit patterns, untouched by any cast of floats."""
    numbers = torch.tensor(list(patterns), dtype=torch.int64)
    # Less twice the sign bit, which two's complement counts as negative.
    return (numbers - ((numbers >> (form.width - 1)) << form.width)).to(form.storage).view(form.dtype)


def binades(tensor: torch.Tensor) -> torch.Tensor:
    """Return the greatest power of two that does not exceed the size of each float64 number; 0 for a subnormal one.

    The number without its sign and fraction bits; infinity for what is not finite.
    """
    return (tensor.contiguous().view(torch.int64) & _FP64_EXPONENT).view(torch.float64)


_FP64_EXPONENT = 0x7FF << 52


def rounded(tensor: torch.Tensor, form: Format) -> torch.Tensor:
    """Round a float64 tensor to `form`, nearest and ties to even, and return it as float64.

    A float64 sum with 1.5 * 2^(52 - fraction bits) times a number's binade has its last bit where the number's last bit
    in `form` is, so that IEEE addition rounds there; subtracting again is exact. No cast to a narrow type takes part.
    """
    # Beyond 2^(bias + 1) everything is infinite, whatever the place.
    places = binades(tensor).clamp(form.smallest_normal, 2.0 ** (form.bias + 1))
    lift = places.mul_(1.5 * 2.0 ** (52 - form.fraction_bits))
    result = ((tensor + lift) - lift).copysign_(tensor)
    return torch.where(result.abs() > form.largest, result * math.inf, result)
