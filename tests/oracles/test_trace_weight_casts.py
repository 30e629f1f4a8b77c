"""Casts of one tensor are counted, those of others and those that change nothing are not, and none is kept alive."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.trace.weight_casts import WeightCasts


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_counts_casts_of_the_weight_only(mode: type[torch.no_grad]) -> None:
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2)

    with WeightCasts(weight) as casts, mode():
        weight.to(torch.float16)
        weight.bfloat16()
        other.to(torch.float16)
        weight.to(torch.float32, copy=True)
        weight * 2

    assert casts.count == 2


def test_counts_only_while_active() -> None:
    weight = torch.ones(2)

    with WeightCasts(weight) as casts:
        pass
    weight.half()

    assert casts.count == 0


def test_keeps_nothing_alive() -> None:
    weight = torch.arange(3.0)

    with WeightCasts(weight) as casts:
        kept = weight.half()
        weight.bfloat16()

    assert [cast.dtype for cast in casts.alive()] == [torch.float16]
    assert casts.alive()[0] is kept
    del kept
    assert casts.alive() == []
