"""Errors in roundings of a format, of results that move with their operands and of ones that do not."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.oracles.numbers.conditioned_error import moved, roundings
from conformance.oracles.numbers.formats import BF16, FP16, Format


def _of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("form", [FP16, BF16])
def test_one_rounding_is_the_formats(form: Format) -> None:
    assert roundings(_of(1 + 3 * form.unit_roundoff), _of(1.0), form) == pytest.approx(3)
    assert roundings(_of(-2.0), _of(-2.0), form) == 0


def test_error_of_small_numbers_is_in_the_smallest_step() -> None:
    assert roundings(_of(2.0**-24), _of(0.0), FP16) == pytest.approx(2)


def test_what_moves_with_the_operands_is_allowed_as_much() -> None:
    exact, near = _of(1.0), [_of(1.25), _of(0.5)]

    assert roundings(_of(2.0), exact, FP16) > 1000
    assert roundings(_of(2.0), exact, FP16, near) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("seen", [math.inf, math.nan])
def test_not_finite_is_infinitely_far_from_a_finite_number(seen: float) -> None:
    assert roundings(_of(seen), _of(100.0), FP16) == math.inf


def test_beyond_the_range_all_is_right() -> None:
    assert roundings(_of(math.inf), _of(70000.0), FP16) == 0
    assert roundings(_of(math.inf), _of(60000.0), FP16, [_of(65000.0)]) == 0
    assert roundings(_of(math.inf), _of(60000.0), FP16) == math.inf


@pytest.mark.parametrize("exact", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_the_same(exact: float) -> None:
    assert roundings(_of(exact), _of(exact), FP16, [_of(exact)]) == 0
    assert roundings(_of(1.0), _of(exact), FP16, [_of(exact)]) == math.inf
    assert roundings(_of(1.0), _of(exact), FP16, [_of(3.0)]) == 0


def test_numbers_of_several_ops_round_at_the_size_of_all() -> None:
    exact, seen = _of(2.0, 0.001), _of(2.0, 0.0)

    assert roundings(seen, exact, FP16) == pytest.approx(2048)
    assert roundings(seen, exact, FP16, together=True) == pytest.approx(1.45, rel=0.01)


def test_empty_tensors_have_no_error() -> None:
    assert roundings(_of(), _of(), BF16) == 0


def test_numbers_move_by_up_to_one_rounding() -> None:
    given = torch.linspace(1, 2, 1000, dtype=torch.float64)

    steps = (moved(given, BF16, torch.Generator().manual_seed(0)) / given - 1) / BF16.unit_roundoff

    assert -1 <= float(steps.min()) < -0.9
    assert 0.9 < float(steps.max()) <= 1
