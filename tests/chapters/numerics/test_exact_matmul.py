"""Products known without multiplying: picked from columns, and repeated; and the sums that show one wrong bit."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.numerics.sparse_matmul import sparse
from conformance.chapters.numerics.tiled_matmul import COLUMNS, ROWS, checksums, tiled
from conformance.oracles.numbers.bits import bits
from conformance.oracles.numbers.formats import BF16, FP16, Format


@pytest.mark.parametrize("shape", [(5, 67, 29), (3, 2, 7), (1, 1, 1), (40, 300, 9)])
def test_picked_columns_are_the_product(shape: tuple[int, int, int]) -> None:
    rng = torch.Generator().manual_seed(3)
    m, k, n = shape
    left, right = torch.randint(-9, 10, (m, k), generator=rng), sparse(rng, k, n, 8, 7)
    dense = right.dense().long()

    assert torch.equal(right.picked_by(left), (left.unsqueeze(2) * dense).sum(1))
    assert torch.equal(right.spread(left[:, :1].expand(m, n)), (left[:, :1].expand(m, n).unsqueeze(1) * dense).sum(2))
    assert (dense != 0).sum(0).eq(min(8, k)).all()


def test_the_first_and_the_last_row_are_picked() -> None:
    right = sparse(torch.Generator().manual_seed(3), 100, 9, 1, 1)

    assert right.rows[0, :2].tolist() == [0, 99]


@pytest.mark.parametrize("form", [FP16, BF16], ids=lambda form: form.name)
def test_tiles_are_the_product(form: Format) -> None:
    made = tiled(torch.Generator().manual_seed(4), form, 300, 40, 250, torch.device("cpu"))
    exact = made.left.double() @ made.right.double()

    assert torch.equal(made.expected, exact.to(form.dtype))
    assert torch.equal(made.expected[ROWS:, COLUMNS:], made.expected[:-ROWS, :-COLUMNS])


def test_every_single_bit_shows_in_one_row_and_one_column() -> None:
    matrix = torch.randn(7, 5, generator=torch.Generator().manual_seed(5)).half()
    before = checksums(matrix)
    for bit in range(16):
        wrong = matrix.clone()
        bits(wrong)[3, 2] ^= torch.tensor(1 << bit).to(torch.int16)

        assert (checksums(wrong) != before).nonzero().flatten().tolist() == [3, 7 + 2]
