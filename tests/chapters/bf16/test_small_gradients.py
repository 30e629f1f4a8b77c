"""The small-gradient task: its figures, its arms and their equal start."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.bf16.small_gradients import FACTOR, OUTPUTS, ROWS, Outcome, train

CPU = torch.device("cpu")


def _arm(dtype: torch.dtype | None, steps: int = 2) -> Outcome:
    return train(CPU, torch.Generator().manual_seed(0), dtype=dtype, scaler=None, steps=steps)


def test_gradients_of_the_outputs_lie_below_fp16_and_are_normal_at_the_default_scale() -> None:
    gradient_of_an_error_of_one = 2 * FACTOR / (ROWS * OUTPUTS)

    assert 8 * gradient_of_an_error_of_one <= 2.0**-25
    assert 65536 * gradient_of_an_error_of_one >= 2.0**-14


def test_arms_start_from_the_same_weights() -> None:
    first, second = _arm(None), _arm(torch.bfloat16)

    assert all(torch.equal(*pair) for pair in zip(first.before, second.before, strict=True))
    assert first.losses[0] == pytest.approx(second.losses[0], rel=0.01)


def test_lost_counts_zeros_that_the_reference_does_not_have() -> None:
    reference = Outcome((torch.tensor([1.0, 0.0, 2.0, 3.0]),), (4.0, 1.0), (), ())
    other = Outcome((torch.tensor([0.0, 0.0, 2.0, 0.0]),), (4.0, 3.0), (), ())

    assert other.lost(reference) == pytest.approx(2 / 3)
    assert (reference.progress, other.progress) == (0.25, 0.75)


def test_fp32_learns() -> None:
    assert _arm(None, steps=20).progress < 0.25
