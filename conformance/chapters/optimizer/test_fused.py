"""Check that fused optimizers use grad_scale and found_inf for every element, and only for one step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import by_step, differences, snapshot
from ...workloads.gradients import NON_FINITE
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.third_party_optimizers import Ordinary, SelfScaling, record_of
from .optimizer_configs import OptimizerConfig
from .support import BAD, ROUTES, build, clones, iterate, left_on, over_optimizers, twins, unmoved


@contract("AMP-OPTIMIZER-060")
@over_optimizers(lambda kind: kind.scales_itself, variants=None)
@pytest.mark.parametrize("bad", [None, math.inf, deep("standard", math.nan)], ids=["clean", "inf", "nan"])
def test_fused_is_handed_scale_and_flag(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, bad: float | None
) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make(kind.gradients, target.device, rng)
        optimizer = build(case, kind, slopes)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**12)
        seen: list[tuple[float | None, float]] = []

        def look(optimizer: Any, args: Any, kwargs: Any, seen: list[tuple[float | None, float]] = seen) -> None:
            scale = optimizer.grad_scale
            seen.append((None if scale is None else float(scale), float(optimizer.found_inf)))

        optimizer.register_step_pre_hook(look)
        slope = slopes.draw(rng)
        loss = slopes.loss(slope if bad is None else with_nonfinite(slope, "last", bad))
        attributes = sorted(vars(optimizer))
        iterate(optimizer, loss, scaler, explicit=explicit)
        case.equal("calls of step()", len(seen), 1)
        case.equal(f"grad_scale received (unscale_ called: {explicit})", seen[0][0], None if explicit else 4096.0)
        case.equal("found_inf received is above zero", seen[0][1] > 0, bad is not None)
        case.equal("attributes of the optimizer after the step", sorted(vars(optimizer)), attributes)


@contract("AMP-OPTIMIZER-061")
@over_optimizers(lambda kind: kind.fused)
@pytest.mark.parametrize(
    "elements", [deep("standard", n) for n in (1, 8, 15, 16, 17, 33)] + [1001, deep("standard", 40_001)]
)
def test_fused_kernel_at_any_size(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, elements: int
) -> None:
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    values = torch.rand(elements, generator=rng).to(target.device) + 1
    slope = torch.randn(elements, generator=rng).to(target.device)
    ours, theirs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    optimizer, plain = kind.make([ours]), kind.make([theirs])
    scaler = torch.amp.GradScaler(target.device_type)
    iterate(optimizer, (ours * slope).sum(), scaler)
    iterate(plain, (theirs * slope).sum())
    for place in (0, elements // 2, elements - 1):
        before = snapshot(optimizer)
        bad = slope.clone()
        bad[place] = math.inf
        iterate(optimizer, (ours * bad).sum(), scaler)
        changed = differences(snapshot(optimizer), before)
        case.equal(f"differences after a step skipped for inf at element {place}", changed, [])
        iterate(optimizer, (ours * slope).sum(), scaler)
        iterate(plain, (theirs * slope).sum())
        case.equal("differences from fp32 after a step", differences(snapshot(optimizer), snapshot(plain)), [])
        case.identical("gradient after the step", ours.grad, slope)


@contract("AMP-OPTIMIZER-060")
@BAD
def test_self_scaling_third_party(case: Case, target: Target, rng: torch.Generator, bad: float) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = SelfScaling(slopes.groups()), torch.amp.GradScaler(target.device_type)
        start, slope = clones(slopes), slopes.draw(rng)
        iterate(optimizer, slopes.loss(with_nonfinite(slope, "first", bad)), scaler, explicit=explicit)
        case.equal("parameters that moved in a skipped step", unmoved(slopes, start), list(range(len(start))))
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number} after a clean step, against p - g", parameter, began - gradient)
        received = [(None if explicit else 65536.0, 1.0), (None if explicit else 32768.0, 0.0)]
        case.equal("scale and flag that it received in each iteration", optimizer.received, received)
        left = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
        case.equal("attributes left on the optimizer", left, [])


@contract("AMP-OPTIMIZER-063")
def test_ordinary_third_party(case: Case, target: Target, rng: torch.Generator) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = Ordinary(slopes.groups()), torch.amp.GradScaler(target.device_type)
        start, slope = clones(slopes), slopes.draw(rng)
        attributes = sorted(vars(optimizer))
        for bad in NON_FINITE.values():
            iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", bad)), scaler, explicit=explicit)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        case.equal("which of grad_scale and found_inf its step() had, per call", optimizer.received, [[]])
        case.equal("attributes of the optimizer after the steps", sorted(vars(optimizer)), attributes)
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number}, against p - g", parameter, began - gradient)


def expect_preset_scale(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, *, explicit: bool
) -> None:
    """Expect a step on the gradient / 8 with a preset grad_scale of 8, and no preset in the next step."""
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    optimizer.grad_scale = torch.tensor(8.0, device=target.device)
    iterate(optimizer, slopes.loss([part * 8 for part in slope]), scaler, explicit=explicit)
    iterate(plain, twin.loss(slope))
    case.equal("differences from fp32 on the gradient / 8", differences(snapshot(optimizer), snapshot(plain)), [])
    case.equal("attributes left on the optimizer", left_on(optimizer), [])
    iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
    iterate(plain, twin.loss(slope))
    changed = differences(snapshot(optimizer), snapshot(plain))
    case.equal("differences from fp32 in the next step, without a preset", changed, [])


@contract("AMP-OPTIMIZER-064")
@over_optimizers(lambda kind: kind.scales_itself, variants=None)
def test_preset_scale_multiplies(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_preset_scale(case, target, rng, kind, explicit=False)


@contract("AMP-OPTIMIZER-066")
@over_optimizers(lambda kind: kind.scales_itself, variants=None)
def test_preset_scale_after_unscale(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_preset_scale(case, target, rng, kind, explicit=True)


@contract("AMP-OPTIMIZER-069")
@over_optimizers(lambda kind: kind.scales_itself, quick=(), variants=None)
def test_flags_of_several_devices(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for devices in (1, 2, 3):
        slopes = LinearLoss.make(kind.gradients, target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(slope), scaler)
        before = snapshot(optimizer)
        optimizer.zero_grad()
        scaler.scale(slopes.loss(with_nonfinite(slope, "last", math.inf))).backward()
        scaler.unscale_(optimizer)
        # As unscale_ records overflows on further devices; GradScaler adds the flags.
        further = [torch.ones((), device=target.device) for _ in range(1, devices)]
        if (record := record_of(scaler, optimizer)) is not None:
            flags = record["found_inf_per_device"]
            flags |= {torch.device("meta", number): flag for number, flag in enumerate(further, 1)}
        else:  # a scaler of another maker, whose sum of flags is changed on its way to the optimizer

            def add(one: Any, *_: Any, further: list[torch.Tensor] = further) -> None:
                one.found_inf = sum(further, one.found_inf)

            optimizer.register_step_pre_hook(add)
        scaler.step(optimizer)
        scaler.update()
        after, what = snapshot(optimizer), f"after a step with inf in gradients on {devices} devices"
        steps, others = (differences(*pair) for pair in zip(by_step(after), by_step(before), strict=True))
        case.equal(f"differences {what}", others, [])
        case.equal(f"step counters that changed {what}", steps, [])
