"""Matrix units in plain arithmetic: block by block, with any width, rounding, alignment and treatment of subnormals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}


def cut(value: torch.Tensor, quantum: torch.Tensor, mode: str) -> torch.Tensor:
    """Round float64 to multiples of `quantum`: "nearest" (ties to even), "zero", "away" (ties away), "up" or "odd"."""
    steps = value / quantum
    rounded = {
        "nearest": torch.round,
        "zero": torch.trunc,
        "away": lambda x: torch.copysign(torch.floor(x.abs() + 0.5), x),
        "up": torch.ceil,
        "odd": lambda x: torch.where(x == torch.trunc(x), x, 2 * torch.floor(x / 2) + 1),
    }[mode](steps)
    return rounded * quantum


def quantum_of(value: torch.Tensor, bits: int) -> torch.Tensor:
    """The last place of a significand of that many bits."""
    _, exponent = torch.frexp(value)
    return torch.ldexp(torch.ones_like(value), torch.where(value == 0, 0, exponent) - bits)


def add(left: torch.Tensor, right: torch.Tensor, bits: int, mode: str) -> torch.Tensor:
    """left + right rounded once to `bits` bits (at most 50), exactly: float64's own rounding is made sticky."""
    total = left + right
    virtual = total - left
    error = (left - (total - virtual)) + (right - virtual)
    # Towards zero by one step of float64 where something was lost, then its last bit is set: a sticky bit.
    over = (error != 0) & (torch.sign(error) != torch.sign(total))
    total = torch.where(over, torch.nextafter(total, torch.zeros_like(total)), total)
    sticky = torch.where(error != 0, total.view(torch.int64) | 1, total.view(torch.int64)).view(torch.float64)
    finite = torch.isfinite(sticky)
    return torch.where(finite, cut(sticky, quantum_of(sticky, bits), mode), sticky)


@dataclass(frozen=True)
class Unit:
    """A matrix unit: blocks of `block` products (1: one addition after the other) added to a running sum.

    With more than one to a block all terms are aligned to the largest, cut towards zero with `extra` bits below the
    last place, added exactly and normalised. `parts` partial sums are added at the end: contiguous ones, or
    `interleaved`; each is rounded to `partial_bits` first where that is given.
    """

    bits: int = 24
    mode: str = "nearest"
    block: int = 1
    extra: int = 0
    parts: int = 1
    interleaved: bool = False
    partial_bits: int | None = None
    flushes_inputs: bool = False
    flushes_results: bool = False
    input_bits: int | None = None
    result_mode: str = "nearest"
    largest: float = math.inf
    """Sums and products beyond it are infinite."""

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The diagonal of left @ right; every other element is zero."""
        ours, theirs = (self._operand(tensor) for tensor in (left, right.t()))
        products = self._bounded(ours * theirs)
        terms = products.shape[1]
        length = terms // self.parts
        sums = []
        for part in range(self.parts):
            places = slice(part, None, self.parts) if self.interleaved else slice(part * length, (part + 1) * length)
            sums.append(self._sum(products[:, places]))
        if self.partial_bits is not None:
            sums = [cut(total, quantum_of(total, self.partial_bits), "nearest") for total in sums]
        total = sums[0]
        for part_sum in sums[1:]:
            total = self._bounded(add(total, part_sum, self.bits, self.mode))
        return torch.diag(self._result(total, left.dtype))

    def _operand(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.double()
        if self.flushes_inputs:
            wide = wide.masked_fill(wide.abs() < torch.finfo(tensor.dtype).tiny, 0.0)
        if self.input_bits is not None:
            wide = cut(wide, quantum_of(wide, self.input_bits), "away")
        return wide

    def _bounded(self, wide: torch.Tensor) -> torch.Tensor:
        return torch.where(wide.abs() > self.largest, torch.copysign(torch.tensor(math.inf).double(), wide), wide)

    def _sum(self, products: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(products.shape[0], dtype=torch.float64)
        for start in range(0, products.shape[1], self.block):
            block = products[:, start : start + self.block]
            if not block.any():
                continue
            total = add(total, block[:, 0], self.bits, self.mode) if self.block == 1 else self._fused(total, block)
            total = self._bounded(total)
        return total

    def _fused(self, total: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        terms = torch.cat([total.unsqueeze(1), block], 1)
        largest = terms.abs().amax(1, keepdim=True)
        place = torch.ldexp(quantum_of(largest, self.bits), torch.tensor(-self.extra))
        exact = cut(terms, place, "zero").sum(1)
        return cut(exact, quantum_of(exact, self.bits), self.mode)

    def _result(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        info = torch.finfo(dtype)
        place = quantum_of(total, _FRACTION_BITS[dtype] + 1).clamp_min(info.tiny * 2.0 ** -_FRACTION_BITS[dtype])
        rounded = torch.where(torch.isfinite(total), cut(total, place, self.result_mode), total)
        if self.flushes_results:
            rounded = rounded.masked_fill(rounded.abs() < info.tiny, 0.0)
        return rounded.to(dtype)


# facts: Fasi et al. 2021; Khattak & Mikaitis 2025: block lengths and extra alignment bits; TF32 has half the block.
V100 = Unit(mode="zero", block=4, extra=0)
A100 = Unit(mode="zero", block=8, extra=1)
H100 = Unit(mode="zero", block=16, extra=2)
A100_TF32 = Unit(mode="zero", block=4, extra=1, input_bits=11)
H100_TF32 = Unit(mode="zero", block=8, extra=2, input_bits=11)
