"""Check that clipping before unscale_ is wrong by the scale, the control of this chapter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .reference import U, clamped, clipped, norm_bound, relative_distance, total_norm
from .support import NORMS, OPTIMIZERS, adam_over, all_identical, backward, grads, scaler_for, workload


@contract("AMP-CLIP-023")
@NORMS
@pytest.mark.parametrize("scale", [4.0, 65536.0], ids=["4", "65536"])
def test_norm_before_unscale(case: Case, target: Target, rng: torch.Generator, norm_type: Any, scale: float) -> None:
    slopes = workload(case, target, rng)
    plain = slopes.copy()
    slope = slopes.draw(rng)
    scaler = scaler_for(target, scale)
    backward(slopes, slope, scaler)
    backward(plain, slope)
    norms = [float(torch.nn.utils.clip_grad_norm_(one.parameters, math.inf, norm_type)) for one in (slopes, plain)]
    expected = scale * total_norm(slope, float(norm_type))
    error = abs(norms[0] - expected) / expected
    case.at_most(
        "distance of the norm from the scale times the true norm",
        error,
        norm_bound(slope, float(norm_type)),
        "relative",
    )
    case.at_least("control: ratio to the norm of fp32", norms[0] / norms[1], scale / 2)


@contract("AMP-CLIP-024")
@OPTIMIZERS
@pytest.mark.parametrize("share", [0.25, 2.0], ids=["above-threshold", "below-threshold"])
def test_gradients_clipped_before_unscale(
    case: Case, target: Target, rng: torch.Generator, fused: bool, share: float
) -> None:
    slopes = workload(case, target, rng, fused=fused)
    slope = slopes.draw(rng)
    norm, scale = total_norm(slope, 2.0), 1024.0
    optimizer, scaler = adam_over(slopes, fused), scaler_for(target, scale)
    backward(slopes, slope, scaler)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, share * norm)
    scaler.step(optimizer)
    wrong = [part / scale for part in clipped([part * scale for part in slope], share * norm, scale * norm)]
    error = relative_distance(grads(slopes), wrong)
    case.at_most("distance from the predicted gradients", error, norm_bound(slope, 2.0) + 4 * U)
    right = total_norm(clipped(slope, share * norm, norm), 2.0)
    seen = right / total_norm(grads(slopes), 2.0)
    case.between("how many times too small the gradients are", seen / (scale / max(share, 1.0)), 0.999, 1.001)


@contract("AMP-CLIP-025")
def test_values_clipped_before_unscale(case: Case, target: Target, rng: torch.Generator) -> None:
    slopes = workload(case, target, rng)
    slope = slopes.draw(rng)
    optimizer, scaler = adam_over(slopes), scaler_for(target, 1024.0)
    backward(slopes, slope, scaler)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5)
    scaler.step(optimizer)
    all_identical(case, "gradient, against one clamped to value / scale", grads(slopes), clamped(slope, 0.5 / 1024))
