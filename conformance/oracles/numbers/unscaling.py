"""Gradients times a factor, on the bit patterns in integers: what the unscaling kernel of GradScaler promises.

No floating-point number of 16 or 32 bits takes part, so that neither a conversion nor a flush-to-zero mode of the
machine can be in the expectation as well. Python's floats multiply float64, whose products need 106 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .formats import FORMATS, FP32, Format


@dataclass(frozen=True)
class _Numbers:
    """Elementwise sign (0 or 1), magnitude * 2^exponent, and what else a pattern can stand for; int64 and bool."""

    sign: torch.Tensor
    magnitude: torch.Tensor
    exponent: torch.Tensor
    infinite: torch.Tensor
    nan: torch.Tensor


def unscaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `gradient` (fp16, bf16, fp32 or fp64, on the CPU) times `factor`, a number of fp32, in a new tensor.

    The product is rounded to fp32 (fp64 for fp64), then to the gradient's dtype, to nearest with ties to even; a factor
    of 1 changes nothing. Source: AmpGradScalerKernels.cpp and AmpKernels.cu, which work in the opmath type.
    """
    if factor == 1.0:
        return gradient.clone()
    if gradient.dtype == torch.float64:
        numbers = [value * factor for value in gradient.flatten().tolist()]
        return torch.tensor(numbers, dtype=torch.float64).reshape(gradient.shape)
    form = FORMATS[gradient.dtype]
    product = _round(
        _product(_decoded(_patterns(gradient), form), _decoded(_patterns(torch.tensor(factor)), FP32)), FP32
    )
    return _encoded(_round(product, form), form).reshape(gradient.shape)


def non_finite(gradient: torch.Tensor) -> bool:
    """Return whether any element of `gradient` is inf, -inf or NaN, by its exponent bits."""
    if gradient.dtype == torch.float64:
        return not all(map(math.isfinite, gradient.flatten().tolist()))
    form = FORMATS[gradient.dtype]
    return bool((_patterns(gradient) & form.infinity == form.infinity).any())


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Return all 65536 numbers of a 16-bit dtype in the order of their bit patterns, infinities and NaNs with them."""
    return torch.arange(2**16, dtype=torch.int64).to(torch.int16).view(dtype)


def _patterns(tensor: torch.Tensor) -> torch.Tensor:
    form = FORMATS[tensor.dtype]
    return tensor.detach().contiguous().view(form.storage).to(torch.int64) & (2**form.width - 1)


def _decoded(patterns: torch.Tensor, form: Format) -> _Numbers:
    sign, magnitude = patterns >> (form.width - 1), patterns & (2 ** (form.width - 1) - 1)
    stored, fraction = magnitude >> form.fraction_bits, magnitude & (2**form.fraction_bits - 1)
    return _Numbers(
        sign,
        torch.where(stored > 0, fraction + 2**form.fraction_bits, fraction),
        stored.clamp(min=1) - form.bias - form.fraction_bits,
        magnitude == form.infinity,
        magnitude > form.infinity,
    )


def _product(left: _Numbers, right: _Numbers) -> _Numbers:
    zero = ((left.magnitude == 0) & ~left.infinite) | ((right.magnitude == 0) & ~right.infinite)
    infinite = left.infinite | right.infinite
    return _Numbers(
        left.sign ^ right.sign,
        left.magnitude * right.magnitude,  # at most 2^48
        left.exponent + right.exponent,
        infinite,
        left.nan | right.nan | (infinite & zero),
    )


def _round(numbers: _Numbers, form: Format) -> _Numbers:
    """Round to the significant bits and the exponents of `form` (IEEE 754-2019, section 4.3.1)."""
    precision, smallest = form.fraction_bits + 1, form.min_exponent - form.fraction_bits
    quantum = (numbers.exponent + _bit_length(numbers.magnitude) - precision).clamp(min=smallest)
    cut = (quantum - numbers.exponent).clamp(0, 62)  # magnitudes are below 2^49: 62 leaves nothing, not even a tie
    kept = numbers.magnitude >> cut
    rest, half = numbers.magnitude - (kept << cut), (torch.ones_like(cut) << cut) >> 1
    up = (cut > 0) & ((rest > half) | ((rest == half) & (kept % 2 == 1)))
    magnitude, exponent = kept + up, numbers.exponent + cut
    largest_exponent = form.bias - form.fraction_bits  # of the last bit of the largest numbers
    over = magnitude >> (largest_exponent + precision - exponent).clamp(0, 62) > 0
    infinite = numbers.infinite | over
    return _Numbers(numbers.sign, magnitude, exponent, infinite, numbers.nan)


def _encoded(numbers: _Numbers, form: Format) -> torch.Tensor:
    """Write numbers that `form` holds exactly as a tensor of its dtype."""
    length = _bit_length(numbers.magnitude)
    last = (numbers.exponent + length - form.fraction_bits - 1).clamp(min=form.min_exponent - form.fraction_bits)
    shift = last - numbers.exponent
    significand = torch.where(
        shift >= 0, numbers.magnitude >> shift.clamp(0, 62), numbers.magnitude << (-shift).clamp(0, 62)
    )
    normal = significand >> form.fraction_bits > 0
    stored = torch.where(normal, last + form.bias + form.fraction_bits, torch.zeros_like(last))
    pattern = (stored << form.fraction_bits) | (significand & (2**form.fraction_bits - 1))
    pattern = torch.where(numbers.magnitude == 0, torch.zeros_like(pattern), pattern)
    pattern = torch.where(numbers.infinite, torch.full_like(pattern, form.infinity), pattern)
    pattern = torch.where(numbers.nan, torch.full_like(pattern, form.infinity + 1), pattern)
    return (pattern | (numbers.sign << (form.width - 1))).to(form.storage).view(form.dtype)


def _bit_length(magnitude: torch.Tensor) -> torch.Tensor:
    # Integers below 2^53 are normal float64 numbers, whose exponent no conversion and no flush-to-zero mode changes.
    return torch.frexp(magnitude.double()).exponent.long()
