"""Exact integer products of any size, made of a repeated small one, and checksums that locate a single wrong bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...oracles.numbers.exact import product
from ...oracles.numbers.formats import Format, rounded

# Primes, so that no tile of a kernel falls together with the period.
ROWS, COLUMNS = 127, 113


@dataclass(frozen=True)
class Tiled:
    """Integer operands (m, k) and (k, n) whose rows and columns repeat, and their product as `form` stores it."""

    left: Tensor
    right: Tensor
    expected: Tensor


def tiled(rng: torch.Generator, form: Format, m: int, k: int, n: int, device: torch.device) -> Tiled:
    """Return operands on `device`: every sum below k * 16^2, hence exact in fp32 up to k = 65,536, and all different.

    The product of one period is computed on the CPU in float64, without a matrix product's kernel, and repeated.
    """
    left = torch.randint(-16, 17, (ROWS, k), generator=rng).float()
    right = torch.randint(-16, 17, (k, COLUMNS), generator=rng).float()
    exact = rounded(product(left, right), form).to(form.dtype).to(device)
    rows = torch.arange(m, device=device) % ROWS
    columns = torch.arange(n, device=device) % COLUMNS
    whole = exact.index_select(0, rows).index_select(1, columns)
    return Tiled(
        left.to(device).index_select(0, rows).contiguous(),
        right.to(device).index_select(1, columns).contiguous(),
        whole,
    )


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a 16- or 32-bit floating tensor as integers, in the same memory."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def checksums(matrix: Tensor) -> Tensor:
    """Return the sums of the patterns in each row and in each column of (m, n), exactly, on its device: m + n int64.

    A difference in a single element changes one of each, so that it is found and located; only four or more in the
    corners of a rectangle can cancel.
    """
    patterns = bits(matrix)
    # 65,536 numbers of 16 bits fit, in half the time.
    wide = torch.int32 if patterns.dtype is torch.int16 and max(patterns.shape) <= 2**16 else torch.int64
    patterns = patterns.to(wide)
    return torch.cat([patterns.sum(1, dtype=wide), patterns.sum(0, dtype=wide)]).long()
