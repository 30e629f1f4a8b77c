"""Exact products with sparse integer matrices of any size, computed by selecting and adding columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sparse:
    """A matrix of `height` rows that has the integers `values` (h, n) at `rows` (h, n), distinct in each column.

    No kernel of a matrix product takes part in its products, and none depends on the order of a sum: all of it is
    integers below 2^31.
    """

    height: int
    rows: Tensor
    values: Tensor

    def dense(self) -> Tensor:
        """Return the whole matrix, (height, n), fp32."""
        whole = torch.zeros(self.height, self.rows.shape[1])
        return whole.scatter_(0, self.rows, self.values.float())

    def picked_by(self, left: Tensor) -> Tensor:
        """Return `left` @ self for a `left` (m, height) of integers: each column adds up h columns of `left`."""
        # Rows of the transposed matrix lie in one piece of memory.
        columns, values = left.t().contiguous(), self.values.to(left.dtype).unsqueeze(2)
        result = columns.index_select(0, self.rows[0]) * values[0]
        for rows, factors in zip(self.rows[1:], values[1:], strict=True):
            result += columns.index_select(0, rows) * factors
        return result.t()

    def spread(self, left: Tensor) -> Tensor:
        """Return `left` @ self' for a `left` (m, n) of integers: each column of `left` goes to h columns."""
        result = torch.zeros(left.shape[0], self.height, dtype=left.dtype)
        for rows, values in zip(self.rows, self.values.to(left.dtype), strict=True):
            result.index_add_(1, rows, left * values)
        return result


def sparse(rng: torch.Generator, height: int, width: int, entries: int, largest: int) -> Sparse:
    """Return a random Sparse of `entries` non-zero integers up to `largest` a column, one in each part of the rows.

    The rows of one column lie `height // entries` apart, so that every part of a sum that is split among workers
    has its share; entries is lowered to `height` where there are fewer rows.
    """
    entries = min(entries, height)
    first = torch.randint(0, height, (width,), generator=rng)
    # The first and the last row, where tiles begin and tails end, are always there.
    first[: min(width, 2)] = torch.tensor([0, height - 1])[:width]
    rows = (first + (torch.arange(entries) * (height // entries)).unsqueeze(1)) % height
    sizes = torch.randint(1, largest + 1, (entries, width), generator=rng)
    signs = torch.randint(0, 2, (entries, width), generator=rng) * 2 - 1
    return Sparse(height, rows, sizes * signs)
