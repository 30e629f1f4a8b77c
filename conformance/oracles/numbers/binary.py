"""Binary floating-point formats: bit patterns and rounding of one number, in integers, without torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Format:
    """An IEEE 754 binary interchange format: one sign bit, a biased exponent, a fraction (section 3.4)."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of tensors that hold it."""
        import torch

        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[self.name]

    @property
    def storage(self) -> torch.dtype:
        """The integers of its width."""
        import torch

        return {16: torch.int16, 32: torch.int32, 64: torch.int64}[self.width]

    @property
    def precision(self) -> int:
        """Significant bits of a normal number."""
        return self.fraction_bits + 1

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest positive number, a subnormal."""
        return self.min_exponent - self.fraction_bits

    @property
    def width(self) -> int:
        """Bits of one number."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def infinity(self) -> int:
        """The pattern of +inf; greater ones (less the sign bit) are NaN."""
        return int((2**self.exponent_bits - 1) << self.fraction_bits)

    @property
    def unit_roundoff(self) -> float:
        """Half the spacing at 1: the largest relative error of one rounding of a normal number."""
        return float(2.0 ** -(self.fraction_bits + 1))

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal."""
        return math.ldexp(1.0, self.smallest_exponent)

    @property
    def smallest_normal(self) -> float:
        return float(2.0**self.min_exponent)

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite number."""
        return float((2 - 2.0**-self.fraction_bits) * 2.0**self.bias)

    @property
    def overflow(self) -> float:
        """The smallest magnitude that rounds to infinity: half a spacing above the largest finite number."""
        return self.largest + 2.0 ** (self.bias - self.fraction_bits - 1)

    def ulp(self, value: float) -> float:
        """Return the spacing of this format at the finite `value`."""
        if abs(value) < self.smallest_normal:
            return self.smallest
        return float(2.0 ** (_exponent(Fraction(abs(value))) - self.fraction_bits))

    def is_nan(self, pattern: int) -> bool:
        return (pattern & ~self._sign) > self.infinity

    def finite_patterns(self) -> range:
        """Return the patterns of +0 and the positive finite numbers, in increasing order of value."""
        return range(self.infinity)

    def value(self, pattern: int) -> float:
        """Return the number that `pattern` stands for, exactly (binary64 holds every number of all three)."""
        sign = -1.0 if pattern & self._sign else 1.0
        magnitude = pattern & ~self._sign
        if magnitude >= self.infinity:
            return sign * float("inf") if magnitude == self.infinity else float("nan")
        exponent, fraction = magnitude >> self.fraction_bits, magnitude & (2**self.fraction_bits - 1)
        if exponent:
            fraction |= 2**self.fraction_bits
        return sign * fraction * 2.0 ** (max(exponent, 1) - self.bias - self.fraction_bits)

    def nearest(self, value: Fraction | float) -> float:
        """Return the number of this format nearest to `value`, ties to even (IEEE 754-2019, section 4.3.1)."""
        if isinstance(value, float):
            if self.fraction_bits == FP64.fraction_bits or value == 0.0 or not math.isfinite(value):
                return value
            return _nearest(value, self)
        if value == 0:
            return 0.0
        exponent = max(_exponent(abs(value)), self.min_exponent)
        spacing = Fraction(2) ** (exponent - self.fraction_bits)
        # Python rounds a Fraction half to even, which is the rule itself.
        rounded = round(value / spacing) * spacing
        if abs(rounded) > Fraction(self.largest):
            return math.inf if value > 0 else -math.inf
        return float(rounded)

    @property
    def _sign(self) -> int:
        return int(1 << (self.width - 1))


FP16 = Format("fp16", 5, 10)
BF16 = Format("bf16", 8, 7)
FP32 = Format("fp32", 8, 23)
FP64 = Format("fp64", 11, 52)


@functools.lru_cache(maxsize=2**14)  # histories of a loss scale multiply the same few numbers time and again
def _nearest(value: float, form: Format) -> float:
    if abs(value) >= 2 * form.largest:  # also keeps ldexp within the range of a double
        return math.copysign(math.inf, value)
    _, exponent = math.frexp(value)
    quantum = max(exponent - form.precision, form.smallest_exponent)
    # round() of a float is exact and goes to even on ties; ldexp by a power of two loses nothing here.
    magnitude = math.ldexp(round(math.ldexp(abs(value), -quantum)), quantum)
    return math.copysign(math.inf if magnitude > form.largest else magnitude, value)


def narrow(pattern: int, form: Format) -> int:
    """Round the fp32 `pattern` to a 16-bit `form`, nearest and ties to even; any NaN gives a quiet NaN.

    IEEE 754-2019, sections 4.3.1 (rounding), 7.4 (overflow goes to infinity) and 6.2.3 (NaN).
    """
    sign = (pattern >> 31) << (form.width - 1)
    magnitude = pattern & 0x7FFF_FFFF
    if magnitude > FP32.infinity:
        return sign | form.infinity | (1 << (form.fraction_bits - 1))
    if magnitude == FP32.infinity:
        return sign | form.infinity
    exponent, significand = magnitude >> FP32.fraction_bits, magnitude & (2**FP32.fraction_bits - 1)
    significand |= (exponent > 0) << FP32.fraction_bits
    # The stored exponent in the target; at or below zero the result is subnormal and loses that many bits more.
    exponent = max(exponent, 1) - FP32.bias + form.bias
    dropped = FP32.fraction_bits - form.fraction_bits + max(0, 1 - exponent)
    kept, rest, half = significand >> dropped, significand & ((1 << dropped) - 1), 1 << (dropped - 1)
    kept += rest > half or (rest == half and kept & 1 == 1)
    # The leading bit of a normal significand counts one into the exponent field, and so does a carry.
    result = kept + (max(exponent - 1, 0) << form.fraction_bits)
    return sign | min(result, form.infinity)


def widen(pattern: int, form: Format) -> int:
    """Return the fp32 pattern of the 16-bit `pattern`: exact, since fp32 holds every number of both types."""
    sign, magnitude = (pattern >> 15) << 31, pattern & 0x7FFF
    exponent, fraction = magnitude >> form.fraction_bits, magnitude & (2**form.fraction_bits - 1)
    shift = FP32.fraction_bits - form.fraction_bits
    if magnitude >= form.infinity:
        return sign | FP32.infinity | (fraction << shift)
    if exponent == 0 and form.bias != FP32.bias:
        if fraction == 0:
            return sign
        # A subnormal of the narrow type is a normal fp32 number: its leading bit becomes the implicit one.
        lost = form.fraction_bits + 1 - fraction.bit_length()
        exponent, fraction = 1 - lost, (fraction << lost) & (2**form.fraction_bits - 1)
    return sign | ((exponent - form.bias + FP32.bias) << FP32.fraction_bits) | (fraction << shift)


def midpoints(form: Format, stride: int = 1) -> list[int]:
    """Return the fp32 patterns at, just below and just above every `stride`-th tie of a 16-bit `form`.

    A tie lies half way between two neighbours of the narrow type; the last one is the overflow threshold.
    Both signs, in increasing order of magnitude.
    """
    patterns = []
    for low in form.finite_patterns()[::stride]:
        middle = _tie(low, form)
        patterns += [middle - 1, middle, middle + 1]
    return patterns + [pattern | 0x8000_0000 for pattern in patterns]


def _tie(low: int, form: Format) -> int:
    """Return the fp32 pattern half way between the narrow patterns `low` and `low + 1`."""
    ends = {0: form.smallest / 2, form.infinity - 1: form.overflow}
    if low in ends:
        return _fp32_pattern(Fraction(ends[low]))
    # Patterns grow in step with their numbers up to and including the next power of two.
    return (widen(low, form) + widen(low + 1, form)) // 2


def _fp32_pattern(exact: Fraction) -> int:
    """Return the pattern of a positive number that fp32 holds exactly."""
    exponent = max(_exponent(exact), FP32.min_exponent)
    significand = exact / Fraction(2) ** (exponent - FP32.fraction_bits)
    return int(significand) + ((exponent + FP32.bias - 1) << FP32.fraction_bits)


def _exponent(positive: Fraction) -> int:
    """Return floor(log2(positive))."""
    guess = positive.numerator.bit_length() - positive.denominator.bit_length()
    return guess if Fraction(2) ** guess <= positive else guess - 1
