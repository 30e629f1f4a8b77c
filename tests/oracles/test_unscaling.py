"""The products of gradients and factors in integers: against Python's own arithmetic, over every 16-bit number."""

from __future__ import annotations

import math
import random

import pytest
import torch

from conformance.oracles.numbers.unscaling import every_number, non_finite, unscaled
from conformance.oracles.optimizer_state import same
from conformance.scaler import model

FORMS = {
    torch.float16: model.FP16,
    torch.bfloat16: model.BF16,
    torch.float32: model.FP32,
    torch.float64: model.FP64,
}
FACTORS = (1.0, 2.0**-16, 1 / 3, -3.0, 2.0**-149, 3 * 2.0**-130, 2.0**127, 0.0, -0.0, math.inf, math.nan)


def _expected(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    values = model.unscaled(model.Gradient(tuple(gradient.tolist()), FORMS[gradient.dtype]), factor).values
    return torch.tensor(values, dtype=gradient.dtype)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(dtype: torch.dtype, factor: float) -> None:
    numbers = every_number(dtype)[:: 1 if factor == -3.0 else 61]
    factor = model.rounded(factor, model.FP32)

    assert same(unscaled(numbers, factor), _expected(numbers, factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_patterns(dtype: torch.dtype) -> None:
    draw = random.Random(7)
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3 * 2.0**-149, 3.4028234663852886e38]
    for _ in range(30):
        bits = [draw.getrandbits(32) for _ in range(40)]
        drawn = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
        numbers = torch.cat([drawn, torch.tensor(edges)]).to(dtype)
        factor = torch.tensor([draw.getrandbits(32)]).to(torch.int32).view(torch.float32).item()
        assert same(unscaled(numbers, factor), _expected(numbers, factor)), factor


def test_ties_go_to_even_and_halves_of_the_smallest_to_zero() -> None:
    odd = torch.tensor([1.0, 3.0, 5.0, -7.0]) * 2.0**-149

    assert (unscaled(odd, 0.5) / 2.0**-149).tolist() == [0.0, 2.0, 2.0, -4.0]
    assert unscaled(torch.tensor([65504.0, 32752.0], dtype=torch.float16), 2.0).tolist() == [math.inf, 65504.0]


def test_non_finite_numbers_are_those_of_python() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every_number(dtype)
        found = [index for index in range(0, 2**16, 97) if non_finite(numbers[index : index + 1])]
        assert found == [index for index in range(0, 2**16, 97) if not math.isfinite(numbers[index].item())]
    assert [non_finite(torch.tensor([0.0, value])) for value in (1.0, math.inf, -math.inf, math.nan)] == [
        False,
        True,
        True,
        True,
    ]
    assert non_finite(torch.tensor([math.nan], dtype=torch.float64))
    assert not non_finite(torch.tensor([1e300], dtype=torch.float64))
