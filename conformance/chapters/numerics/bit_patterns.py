"""Bit patterns of 16-bit types as tensors, and their rounding in integer arithmetic (`formats.narrow`, vectorized)."""

from __future__ import annotations

import torch

from ...oracles.numbers.formats import FP32, Format


def narrowed(patterns: torch.Tensor, form: Format) -> torch.Tensor:
    """Round fp32 patterns (int64, 0 to 2^32 - 1) to a 16-bit `form`, nearest and ties to even; returns its numbers.

    IEEE 754-2019, sections 4.3.1, 7.4 and 6.2.3. No cast of floating-point numbers takes part.
    """
    size = patterns & 0x7FFF_FFFF
    exponent, fraction = size >> FP32.fraction_bits, size & (2**FP32.fraction_bits - 1)
    significand = fraction | ((exponent > 0).long() << FP32.fraction_bits)
    stored = exponent.clamp(min=1) - FP32.bias + form.bias
    # Below the smallest normal number a bit more is lost for each exponent; beyond 62 nothing is left anyway.
    lost = (FP32.fraction_bits - form.fraction_bits + (1 - stored).clamp(min=0)).clamp(max=62)
    kept, rest, half = significand >> lost, significand & ((1 << lost) - 1), 1 << (lost - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept % 2 == 1))).long()
    result = (kept + ((stored - 1).clamp(min=0) << form.fraction_bits)).clamp(max=form.infinity)
    quiet = form.infinity | (1 << (form.fraction_bits - 1))
    result = torch.where(size > FP32.infinity, torch.full_like(result, quiet), result)
    return _numbers(result | (patterns >> 31 << 15), form)


def all_patterns(form: Format) -> torch.Tensor:
    """Return the 65,536 numbers of a 16-bit `form`, in the order of their patterns."""
    return _numbers(torch.arange(2**16), form)


def _numbers(patterns: torch.Tensor, form: Format) -> torch.Tensor:
    return torch.where(patterns >= 2**15, patterns - 2**16, patterns).to(form.storage).view(form.dtype)


def widened(form: Format) -> torch.Tensor:
    """Return the fp32 patterns (int64) of the 65,536 numbers of a 16-bit `form`; exact, as `float_formats.widen`."""
    patterns = torch.arange(2**16)
    size = patterns & 0x7FFF
    exponent, fraction = size >> form.fraction_bits, size & (2**form.fraction_bits - 1)
    shift = FP32.fraction_bits - form.fraction_bits
    result = ((exponent + FP32.bias - form.bias) << FP32.fraction_bits) | (fraction << shift)
    if form.bias == FP32.bias:
        result = size << shift
    else:
        # A subnormal number is one of fp32 whose leading bit is implicit: it moves up until it is.
        lost = form.fraction_bits + 1 - torch.tensor([number.bit_length() for number in range(2**form.fraction_bits)])
        lost = lost[fraction]
        moved = (fraction << lost) & (2**form.fraction_bits - 1)
        small = ((1 - lost + FP32.bias - form.bias) << FP32.fraction_bits) | (moved << shift)
        result = torch.where(exponent == 0, torch.where(fraction == 0, torch.zeros_like(small), small), result)
    result = torch.where(size >= form.infinity, FP32.infinity | (fraction << shift), result)
    return result | (patterns >> 15 << 31)


def unsigned_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with every -0.0 replaced by 0.0: IEEE 754 leaves the sign of a sum of zeros to the order."""
    return torch.where(tensor == 0, tensor.abs(), tensor)
