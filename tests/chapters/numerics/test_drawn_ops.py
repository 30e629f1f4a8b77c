"""What is drawn: the same from one seed, distinct numbers, sizes behind whole blocks, every family judged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from conformance.chapters.numerics.drawn_ops import BATCHES, DISTINCT, FAMILIES, SIZES, Draws
from conformance.oracles.relations.outcomes import run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_draws_the_same(family: str) -> None:
    one, other = (FAMILIES[family](Draws("seed")) for _ in range(2))

    assert one.described() == other.described()
    for ours, theirs in zip(one.leaves, other.leaves, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_calls_that_torch_takes(family: str) -> None:
    programs = [FAMILIES[family](Draws(f"{family} {number}")) for number in range(30)]
    wide = [one.cast(dict.fromkeys(one.tensors, torch.float64)) for one in programs]
    refused = [one.described() for one in wide if run(one).error is not None]

    assert len(refused) <= 3, refused
    assert len({one.described() for one in programs}) >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distinct_numbers_stay_distinct_in_16_bits(dtype: torch.dtype) -> None:
    numbers = Draws("x").distinct(DISTINCT).to(dtype).double().flatten()

    assert numbers.unique().numel() == DISTINCT
    assert bool(numbers.isfinite().all())


def test_more_numbers_than_both_types_have_are_refused() -> None:
    with pytest.raises(ValueError, match="share 7423"):
        Draws("x").distinct(DISTINCT + 1)


def test_sizes_are_on_both_sides_of_blocks() -> None:
    for block in (8, 16):
        assert {block - 1, block, block + 1} <= set(SIZES)
    assert {16, 17, 64, 65} <= set(BATCHES)
    assert all(low < high for low, high in pairwise(SIZES))


def test_sizes_hold_few_numbers() -> None:
    assert all(torch.Size(Draws(str(n)).sizes(4, numbers=500)).numel() <= 500 for n in range(200))
