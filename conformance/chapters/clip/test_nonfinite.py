"""Check that clipping never hides inf or NaN from the scaler."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from ...workloads.gradients import holding
from ...workloads.linear_loss import with_nonfinite
from .reference import clipped
from .support import (
    CHUNK,
    FOREACH,
    NONFINITE,
    NORMS,
    OPTIMIZERS,
    adam_over,
    all_identical,
    backward,
    grads,
    implementations,
    scaler_for,
    workload,
)

BAD = pytest.mark.parametrize(
    "bad",
    [pytest.param(math.inf, id="inf"), pytest.param(math.nan, id="nan"), deep("standard", -math.inf, id="minus-inf")],
)


@contract("AMP-CLIP-030")
@BAD
@OPTIMIZERS
@pytest.mark.parametrize(
    "clip",
    ["norm", "value", *(deep("standard", name) for name in ("norm-inf", "norm-1", "norm-for-loop", "value-for-loop"))],
)
def test_bad_gradients_still_skip(
    case: Case, target: Target, rng: torch.Generator, bad: float, fused: bool, clip: str
) -> None:
    clips: dict[str, Callable[[Any], Any]] = {
        "norm": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0),
        "norm-inf": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, math.inf),
        "norm-1": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, 1.0),
        "norm-for-loop": lambda given: torch.nn.utils.clip_grad_norm_(given, 1.0, foreach=False),
        "value": lambda given: torch.nn.utils.clip_grad_value_(given, 1.0),
        "value-for-loop": lambda given: torch.nn.utils.clip_grad_value_(given, 1.0, foreach=False),
    }
    slopes = workload(case, target, rng, fused=fused)
    optimizer, scaler = adam_over(slopes, fused, weight_decay=0.125), scaler_for(target)
    clean = slopes.draw(rng)
    backward(slopes, clean, scaler)
    scaler.step(optimizer)
    scaler.update()
    for place in ("first", "last"):
        before, scale = snapshot(optimizer), scaler.get_scale()
        backward(slopes, with_nonfinite(clean, place, bad), scaler)
        scaler.unscale_(optimizer)
        clips[clip](slopes.parameters)
        answer = scaler.step(optimizer)
        scaler.update()
        case.equal(
            f"differences after the step, non-finite value {place}", differences(snapshot(optimizer), before), []
        )
        case.equal("result of step()", answer, None)
        case.equal("scale after update()", scaler.get_scale(), scale / 2)
    backward(slopes, clean, scaler)
    scaler.unscale_(optimizer)
    clips[clip](slopes.parameters)
    scaler.step(optimizer)
    case.true("control: a clean step with the same clipping steps", bool(differences(snapshot(optimizer), before)))


@contract("AMP-CLIP-031")
@OPTIMIZERS
def test_finite_after_clipping(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    optimizer, scaler = adam_over(slopes, fused), scaler_for(target)
    clean = slopes.draw(rng)
    backward(slopes, clean, scaler)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(optimizer)
    backward(slopes, with_nonfinite(clean, "last", math.inf), scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(slopes.parameters, 1.0)
    case.equal(
        "every gradient is finite after clipping", all(bool(one.isfinite().all()) for one in grads(slopes)), True
    )
    scaler.step(optimizer)
    scaler.update()
    case.equal("differences after the step", differences(snapshot(optimizer), before), [])
    case.equal("scale after update()", scaler.get_scale(), 32768.0)


@contract("AMP-CLIP-032")
@BAD
@NORMS
@FOREACH
def test_error_if_nonfinite(
    case: Case, target: Target, rng: torch.Generator, bad: float, norm_type: Any, foreach: bool | None
) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = adam_over(slopes), scaler_for(target)
    backward(slopes, with_nonfinite(slopes.draw(rng), "last", bad), scaler)
    scaler.unscale_(optimizer)
    before = grads(slopes)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, slopes.parameters, 1.0, norm_type, foreach=foreach)
    case.raises("clipping", RuntimeError, functools.partial(clip, error_if_nonfinite=True), names=(NONFINITE,))
    all_identical(case, "gradient after the refusal", grads(slopes), before)
    case.equal("norm is finite without the option", math.isfinite(float(clip())), False)
    scaler.update()
    backward(slopes, slopes.draw(rng), scaler)
    scaler.unscale_(optimizer)
    norm = float(clip(error_if_nonfinite=True))
    case.equal("control: norm of clean gradients is finite", math.isfinite(norm), True)


@contract("AMP-CLIP-032")
@BAD
def test_error_if_nonfinite_anywhere(case: Case, target: Target, bad: float) -> None:
    """Long gradients, with one such value in the first, the last, or at a border of the chunks of the kernels."""
    size = 2 * CHUNK + 3
    wrong = []
    for foreach, norm_type, at in itertools.product(
        implementations(target), (1.0, 2.0, 3.0, math.inf), (0, CHUNK - 1, CHUNK, size - 1)
    ):
        gradients = [torch.ones(length, device=target.device) for length in (5, size, CHUNK)]
        gradients[1][at] = bad
        norm = float(torch.nn.utils.clip_grad_norm_(holding(gradients), 1.0, norm_type, foreach=foreach))
        if math.isnan(norm) != math.isnan(bad) or math.isfinite(norm):
            wrong.append(f"foreach={foreach}, type {norm_type}, element {at}: {norm}")
    case.equal(f"norms of gradients with {bad} that are not {abs(bad)}", wrong[:3], [])


@contract("AMP-CLIP-033")
@OPTIMIZERS
def test_training_through_bad_gradients(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = adam_over(slopes, fused), adam_over(plain, fused), scaler_for(target)
    for bad in (None, math.inf, None, math.nan, -math.inf, None):
        slope = slopes.draw(rng)
        backward(slopes, slope if bad is None else with_nonfinite(slope, "first", bad), scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(slopes.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if bad is None:
            backward(plain, slope)
            torch.nn.utils.clip_grad_norm_(plain.parameters, 1.0)
            control.step()
    case.equal("differences from clipped fp32 training", differences(snapshot(optimizer), snapshot(control)), [])
    case.equal("scale after three skips", scaler.get_scale(), 8192.0)


@contract("AMP-CLIP-034")
@BAD
@FOREACH
def test_what_clipping_leaves_of_bad_gradients(
    case: Case, target: Target, rng: torch.Generator, bad: float, foreach: bool | None
) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = adam_over(slopes), scaler_for(target)
    slope = with_nonfinite(slopes.draw(rng), "last", bad)
    backward(slopes, slope, scaler)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(slopes.parameters, 1.0, foreach=foreach)
    exact = [part.float().to(target.device) for part in clipped(slope, 1.0, abs(bad))]
    all_identical(case, f"gradient times 1 / {abs(bad)}", grads(slopes), exact)
