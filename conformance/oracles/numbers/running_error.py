"""Float64 values that carry a bound on the error of evaluating them in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

UNIT = 2.0**-24
"""Half the spacing of float32 at 1: the largest relative error of one correctly rounded operation."""

ELEMENTARY = 4 * UNIT
"""exp, log and log1p are not correctly rounded; CUDA's single precision ones stay within 2 ulp (CUDA C++
Programming Guide, mathematical functions), the CPU's vectorised ones (SLEEF u10) within 1."""

TINY = 2.0**-126
"""The smallest normal float32: what flushing a subnormal to zero may cost."""


CONFIDENCE = math.sqrt(2 * math.log(2 / 1e-12))
"""7.5 standard deviations: what a sum of independent sub-Gaussian errors exceeds once in 10^12 (W. Hoeffding,
Probability inequalities for sums of bounded random variables, J. Amer. Statist. Assoc. 58, 1963)."""


@dataclass(frozen=True)
class Rounded:
    """A float64 tensor and, element by element, how far a float32 evaluation of it may be off.

    The running error analysis of Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.3:
    every operation passes on the errors of its operands and adds its own rounding. `value` may take part in
    a float64 autograd graph; `error` never does.
    """

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exact(cls, tensor: torch.Tensor) -> Rounded:
        """Wrap inputs that float32 represents exactly."""
        return cls(tensor.double(), torch.zeros_like(tensor, dtype=torch.float64).detach())

    @classmethod
    def constant(cls, number: float) -> Rounded:
        """Wrap a Python number that float32 may have to round."""
        value = torch.tensor(number, dtype=torch.float64)
        return cls(value, UNIT * value.abs())

    def __add__(self, other: Rounded | float) -> Rounded:
        right = _operand(other)
        return _rounded(self.value + right.value, self.error + right.error)

    def __sub__(self, other: Rounded | float) -> Rounded:
        return self + -_operand(other)

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error)

    def __mul__(self, other: Rounded | float) -> Rounded:
        right = _operand(other)
        left_size, right_size = self.value.detach().abs(), right.value.detach().abs()
        passed = left_size * right.error + right_size * self.error + self.error * right.error
        return _rounded(self.value * right.value, passed)

    def __truediv__(self, other: Rounded | float) -> Rounded:
        right = _operand(other)
        value = self.value / right.value
        smallest = (right.value.detach().abs() - right.error).clamp_min(0)
        return _rounded(value, (self.error + value.detach().abs() * right.error) / smallest)

    def exp(self) -> Rounded:
        """Return the exponential; that of zero, or of what a flush made of it, is exactly 1 (ISO C, F.10.3.1)."""
        value = self.value.exp()
        found = _rounded(value, value.detach() * self.error.expm1(), ELEMENTARY)
        return Rounded(value, found.error.masked_fill((self.value == 0) & (self.error <= TINY), 0.0))

    def log(self) -> Rounded:
        return _rounded(self.value.log(), self.error / (self.value.detach() - self.error), ELEMENTARY)

    def log1p(self) -> Rounded:
        return _rounded(self.value.log1p(), self.error / (1 + self.value.detach() - self.error), ELEMENTARY)

    def sqrt(self) -> Rounded:
        inside = self.value.detach()
        spread = (inside + self.error).sqrt() - (inside - self.error).clamp_min(0).sqrt()
        return _rounded(self.value.sqrt(), spread)

    def abs(self) -> Rounded:
        return Rounded(self.value.abs(), self.error)

    def clamp_min(self, floor: float) -> Rounded:
        return Rounded(self.value.clamp_min(floor), self.error + UNIT * abs(floor))

    def minimum(self, other: Rounded) -> Rounded:
        return Rounded(torch.minimum(self.value, other.value), torch.maximum(self.error, other.error))

    def where(self, mask: torch.Tensor, other: Rounded | float) -> Rounded:
        """Take this value where `mask` holds, `other` elsewhere."""
        right = _operand(other)
        return Rounded(torch.where(mask, self.value, right.value), torch.where(mask, self.error, right.error))

    def sum(self, *dims: int) -> Rounded:
        """Add the elements along `dims` (all without any), in whatever order.

        The error of a sum of n terms in any order is at most (n - 1) u times the sum of their sizes, to first
        order (Higham, section 4.2).
        """
        axes = dims or tuple(range(self.value.dim()))
        value = self.value.sum(axes)
        terms = self.value.numel() // max(value.numel(), 1)
        sizes = (self.value.detach().abs() + self.error).sum(axes)
        return Rounded(value, self.error.sum(axes) + (terms - 1) * UNIT * sizes)

    def view(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> Rounded:
        """Apply an indexing or reshaping function, which rounds nothing."""
        return Rounded(transform(self.value), transform(self.error))


def _operand(other: Rounded | float) -> Rounded:
    return other if isinstance(other, Rounded) else Rounded.constant(other)


def _rounded(value: torch.Tensor, passed: torch.Tensor, unit: float = UNIT) -> Rounded:
    return Rounded(value, passed + unit * (value.detach().abs() + passed) + TINY)
