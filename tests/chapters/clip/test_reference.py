"""The clip chapter's oracle: norms, coefficients, clamping and their bounds, on known results."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.chapters.clip.reference import clamped, clipped, norm_bound, relative_distance, total_norm

PAIR = [torch.tensor([3.0, 0.0]), torch.tensor([[-4.0]])]


@pytest.mark.parametrize(
    ("norm_type", "expected"),
    [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0), (0.5, 7 + 2 * math.sqrt(12)), (3.0, 91 ** (1 / 3))],
)
def test_total_norm(norm_type: float, expected: float) -> None:
    assert total_norm(PAIR, norm_type) == pytest.approx(expected, rel=1e-14)
    assert total_norm([], norm_type) == 0.0


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(-math.inf, 2.0), (-1.0, 1.0), (-2.0, (1 / 4 + 1 / 16 + 1 / 16) ** -0.5), (0.0, 3.0)]
)
def test_total_norm_of_orders_that_are_no_norms(norm_type: float, expected: float) -> None:
    assert total_norm([torch.tensor([-2.0, 4.0]), torch.tensor(4.0)], norm_type) == pytest.approx(expected, rel=1e-14)


def test_total_norm_with_zeros() -> None:
    gradients = [torch.tensor([0.0, 3.0]), torch.tensor([0.0, -0.0])]

    assert [total_norm(gradients, p) for p in (0.0, -1.0, -math.inf)] == [1.0, 0.0, 0.0]


def test_total_norm_adds_exactly() -> None:
    assert total_norm([torch.tensor([1.0, 2.0**-30]).double()], 1.0) == 1 + 2.0**-30


def test_clipped_gradients_have_the_asked_norm_and_short_ones_are_kept() -> None:
    assert clipped(PAIR, 2.5 + 0.5e-6, 5.0)[1].tolist() == [[pytest.approx(-2.0, rel=1e-12)]]
    assert clipped(PAIR, 6.0, 5.0)[0].tolist() == [3.0, 0.0]
    assert clipped([torch.tensor([1e-6])], 1e-6, 1e-6)[0].item() == pytest.approx(0.5e-6, rel=1e-6)


def test_clamped_keeps_dtype_shape_sign_of_zero_and_nan() -> None:
    odd = torch.tensor([[2.0, -2.0, 0.5], [-0.0, math.nan, -math.inf]])

    result = clamped([odd], 0.5)[0]

    assert (result.dtype, result.shape) == (odd.dtype, odd.shape)
    assert result.flatten().tolist()[:4] == [0.5, -0.5, 0.5, 0.0]
    assert math.copysign(1, result[1, 0].item()) == -1
    assert math.isnan(result[1, 1].item())
    assert result[1, 2].item() == -0.5


def test_bound_covers_torch_and_tells_a_lower_precision() -> None:
    gradients = [torch.rand(1000, generator=torch.Generator().manual_seed(3)) for _ in range(4)]
    for norm_type in (0.5, 1.0, 2.0, 3.0, math.inf, -1.0, -math.inf):
        exact = total_norm(gradients, norm_type)
        error = abs(float(torch.nn.utils.get_total_norm(gradients, norm_type)) - exact) / exact
        assert error <= norm_bound(gradients, norm_type)
    assert norm_bound(gradients, 2.0) < 2.0**-12
    assert norm_bound(gradients, math.inf) == 0.0


def test_relative_distance_is_the_largest_and_finds_lost_elements() -> None:
    one, nothing = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.0])

    assert relative_distance([one], [torch.tensor([1.0, 5.0])]) == pytest.approx(0.2)
    assert relative_distance([nothing], [nothing]) == 0.0
    assert relative_distance([one], [nothing]) == math.inf
    assert relative_distance([torch.tensor([math.nan])], [torch.tensor([1.0])]) == math.inf
