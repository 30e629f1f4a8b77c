"""Check that steps with clipping equal fp32 training, for all gradients, one optimizer or one parameter group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from .reference import U, clipped, norm_bound, relative_distance, total_norm
from .support import FOREACH, OPTIMIZERS, adam_over, all_identical, backward, grads, scaler_for, workload


@contract("AMP-CLIP-040")
@OPTIMIZERS
@pytest.mark.parametrize("clipped_one", [0, 1])
def test_one_of_two_optimizers(case: Case, target: Target, rng: torch.Generator, fused: bool, clipped_one: int) -> None:
    slopes = [workload(case, target, rng, fused=fused) for _ in range(2)]
    twins = [one.copy() for one in slopes]
    optimizers = [adam_over(one, fused) for one in slopes]
    controls = [adam_over(one, fused) for one in twins]
    scaler = scaler_for(target)
    slopes_of_each = [one.draw(rng) for one in slopes]
    for one, twin, slope in zip(slopes, twins, slopes_of_each, strict=True):
        backward(one, slope, scaler)
        backward(twin, slope)
    scaler.unscale_(optimizers[clipped_one])
    for parameters in (slopes[clipped_one].parameters, twins[clipped_one].parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    still_scaled = [part * 65536.0 for part in slopes_of_each[1 - clipped_one]]
    all_identical(case, "other optimizer's gradient, still scaled", grads(slopes[1 - clipped_one]), still_scaled)
    for optimizer, control in zip(optimizers, controls, strict=True):
        scaler.step(optimizer)
        control.step()
    scaler.update()
    for number, (optimizer, control) in enumerate(zip(optimizers, controls, strict=True)):
        changed = differences(snapshot(optimizer), snapshot(control))
        case.equal(f"differences from fp32 in optimizer {number}", changed, [])


@contract("AMP-CLIP-041")
@OPTIMIZERS
def test_one_group(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = adam_over(slopes, fused), adam_over(plain, fused), scaler_for(target)
    slope = slopes.draw(rng)
    backward(slopes, slope, scaler)
    backward(plain, slope)
    scaler.unscale_(optimizer)
    for one in (optimizer, control):
        torch.nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.5)
    all_identical(case, "gradient of the group that is not clipped", grads(slopes)[2:], slope[2:])
    scaler.step(optimizer)
    control.step()
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(control)), [])


@contract("AMP-CLIP-070")
@OPTIMIZERS
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("enabled", [True, False], ids=["scaler", "disabled-scaler"])
def test_whole_step(case: Case, target: Target, rng: torch.Generator, fused: bool, clip: str, enabled: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control = adam_over(slopes, fused), adam_over(plain, fused)
    scaler = torch.amp.GradScaler(target.device_type, enabled=enabled)
    clips: dict[str, Callable[[Any], Any]] = {
        "norm": lambda given: torch.nn.utils.clip_grad_norm_(given, 0.75),
        "value": lambda given: torch.nn.utils.clip_grad_value_(given, 0.5),
    }
    for number in range(3):
        slope = slopes.draw(rng)
        backward(slopes, slope, scaler)
        backward(plain, slope)
        scaler.unscale_(optimizer)
        for one in (slopes, plain):
            clips[clip](one.parameters)
        scaler.step(optimizer)
        scaler.update()
        control.step()
        changed = differences(snapshot(optimizer), snapshot(control))
        case.equal(f"differences from fp32 after step {number + 1}", changed, [])
        all_identical(case, f"gradient after step {number + 1}", grads(slopes), grads(plain))


@contract("AMP-CLIP-071")
@OPTIMIZERS
def test_whole_amp_step(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, fused: bool) -> None:
    """Use small integers, for which every product, sum and scaled gradient of the layer is exact in 16 bit."""

    def integers(reach: int, *shape: int) -> torch.Tensor:
        return torch.randint(-reach, reach + 1, shape, generator=rng).float().to(target.device)

    if fused:
        case.require_fused(target, torch.optim.Adam)
    inputs, weights, targets = integers(3, 6, 9), integers(2, 5, 9), integers(2, 6, 5)
    layers = [torch.nn.Linear(9, 5, bias=False).to(target.device) for _ in range(2)]
    for layer in layers:
        layer.weight.data.copy_(weights)
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.25, fused=fused) for layer in layers]
    scaler = scaler_for(target, 256.0)
    dtypes = []
    for region, (layer, optimizer) in zip((True, False), zip(layers, optimizers, strict=True), strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            with target.autocast(amp_dtype, enabled=region):
                outputs = layer(inputs)
                loss = (outputs.float() * targets).sum()
            (scaler.scale(loss) if region else loss).backward()
            if region:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            if region:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        dtypes.append(outputs.dtype)
    case.equal("control: dtypes of the outputs, AMP and fp32", dtypes, [amp_dtype, torch.float32])
    case.identical("clipped gradient", layers[0].weight.grad, layers[1].weight.grad)
    case.identical("weight", layers[0].weight, layers[1].weight)
    exact = clipped([targets.T @ inputs], 1.0, total_norm([targets.T @ inputs], 2.0))
    error = relative_distance([layers[0].weight.grad], exact)
    case.at_most("error of the clipped gradient", error, norm_bound(exact, 2.0) + 4 * U, "relative")


@contract("AMP-CLIP-072")
@OPTIMIZERS
def test_accumulated(case: Case, target: Target, rng: torch.Generator, fused: bool) -> None:
    slopes = workload(case, target, rng, fused=fused)
    plain = slopes.copy()
    optimizer, control, scaler = adam_over(slopes, fused), adam_over(plain, fused), scaler_for(target)
    parts = [slopes.draw(rng) for _ in range(3)]
    for part in parts:
        scaler.scale(slopes.loss(part)).backward()
        plain.loss(part).backward()
    scaler.unscale_(optimizer)
    for one in (slopes, plain):
        torch.nn.utils.clip_grad_norm_(one.parameters, 0.5)
    all_identical(case, "clipped sum of gradients", grads(slopes), grads(plain))
    scaler.step(optimizer)
    control.step()
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(control)), [])


@contract("AMP-CLIP-073")
@FOREACH
def test_clipping_inside_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, foreach: bool | None
) -> None:
    inside = workload(case, target, rng, foreach)
    outside = inside.copy()
    slope = inside.draw(rng)
    for one in (inside, outside):
        backward(one, slope)
    with target.autocast(amp_dtype):
        norm = torch.nn.utils.clip_grad_norm_(inside.parameters, 0.5, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(outside.parameters, 0.5, foreach=foreach)
    case.identical("norm, against outside the region", norm, expected)
    all_identical(case, "clipped gradient, against outside the region", grads(inside), grads(outside))


@contract("AMP-CLIP-074")
@FOREACH
def test_clipping_reads_nothing_back(case: Case, target: Target, rng: torch.Generator, foreach: bool | None) -> None:
    slopes = workload(case, target, rng, foreach)
    optimizer, scaler = adam_over(slopes), scaler_for(target)
    backward(slopes, slopes.draw(rng), scaler)
    with OpTrace() as trace:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(slopes.parameters, 0.5, foreach=foreach)
        torch.nn.utils.clip_grad_value_(slopes.parameters, 0.5, foreach=foreach)
    case.equal("values copied to the host", counts.reads(trace.ops), 0)
    with trace:
        norm.item()
    case.equal("control: with one .item()", counts.reads(trace.ops), 1)


@contract("AMP-CLIP-080")
def test_deprecated_spelling(case: Case, target: Target, rng: torch.Generator) -> None:
    old = workload(case, target, rng)
    new = old.copy()
    slope = old.draw(rng)
    for one in (old, new):
        backward(one, slope)
    clip = functools.partial(torch.nn.utils.clip_grad_norm, old.parameters, 0.5)
    norm = case.warns("torch.nn.utils.clip_grad_norm", FutureWarning, clip, names=("torch.nn.utils.clip_grad_norm_",))
    case.identical("norm", norm, torch.nn.utils.clip_grad_norm_(new.parameters, 0.5))
    all_identical(case, "clipped gradient", grads(old), grads(new))
