"""Check that a skipped step changes neither parameters nor optimizer state, and that training continues without it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, gradients, on_host, snapshot
from ...workloads.gradients import NON_FINITE
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .optimizer_configs import OptimizerConfig
from .support import (
    ALL,
    BAD,
    ROUTES,
    build,
    clones,
    iterate,
    only,
    over_optimizers,
    uninitialised_memory_is_nan,
    unmoved,
)


@contract("AMP-OPTIMIZER-010")
@over_optimizers()
@BAD
def test_skip_keeps_parameters(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, bad: float
) -> None:
    for explicit in ROUTES:
        for place in ("first", "last"):
            slopes = LinearLoss.make(kind.gradients, target.device, rng)
            optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
            before, clean = only("parameter/", snapshot(optimizer)), slopes.draw(rng)
            iterate(optimizer, slopes.loss(with_nonfinite(clean, place, bad)), scaler, explicit=explicit)
            route = f"bad value {place}, {'unscale_ first' if explicit else 'step alone'}"
            changed = differences(only("parameter/", snapshot(optimizer)), before)
            case.equal(f"parameters that the skipped first step changed ({route})", changed, [])
    copies = clones(slopes)
    iterate(optimizer, slopes.loss(clean), scaler)
    case.equal("control: parameters that a clean step does not move", unmoved(slopes, copies), [])


@contract("AMP-OPTIMIZER-011")
@over_optimizers(quick=())
@BAD
def test_skip_keeps_state(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, bad: float) -> None:
    for explicit in ROUTES:
        for place in ("first", "last"):
            slopes = LinearLoss.make(kind.gradients, target.device, rng)
            optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
            start = snapshot(optimizer)
            clean = slopes.draw(rng)
            iterate(optimizer, slopes.loss(clean), scaler)
            before = snapshot(optimizer)
            iterate(optimizer, slopes.loss(with_nonfinite(slopes.draw(rng), place, bad)), scaler, explicit=explicit)
            route = f"bad value {place}, {'unscale_ first' if explicit else 'step alone'}"
            changed = differences(snapshot(optimizer), before)
            case.equal(f"parameters and state that the skipped step changed ({route})", changed, [])
    case.true("control: the clean step before it changed something", bool(differences(before, start)))


@contract("AMP-OPTIMIZER-012")
@over_optimizers(lambda kind: kind.accepts("weight_decay") and kind.first)
def test_skip_applies_no_weight_decay(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer = build(case, kind, slopes, weight_decay=0.125)
    scaler = torch.amp.GradScaler(target.device_type)
    nothing = [torch.zeros_like(slope) for slope in slopes.draw(rng)]
    for bad in NON_FINITE.values():
        copies = only("parameter/", snapshot(optimizer))
        iterate(optimizer, slopes.loss(with_nonfinite(nothing, "last", bad)), scaler)
        changed = differences(only("parameter/", snapshot(optimizer)), copies)
        case.equal(f"parameters that decayed in a step skipped for {bad}", changed, [])
    before = clones(slopes)
    for _ in range(2):  # the first step only starts the averages of some
        iterate(optimizer, slopes.loss(nothing), scaler)
    case.equal("control: parameters that a clean step with zero gradients does not decay", unmoved(slopes, before), [])


@contract("AMP-OPTIMIZER-013")
@over_optimizers(lambda kind: not kind.fused, variants=None)
def test_skipped_first_step_makes_no_state(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    before = snapshot(optimizer)  # Adagrad creates its state in the constructor
    entries = list(optimizer.state_dict()["state"])
    iterate(optimizer, slopes.loss(with_nonfinite(slopes.draw(rng), "last", math.inf)), scaler)
    case.equal("state after a skipped first step, against before it", differences(snapshot(optimizer), before), [])
    # An entry without values is none of a snapshot, and one more in a checkpoint.
    case.equal("parameters that have an entry after it", list(optimizer.state_dict()["state"]), entries)


@contract("AMP-OPTIMIZER-014")
@over_optimizers(lambda kind: kind.fused, variants=None)
def test_skipped_first_step_of_fused(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    before = snapshot(optimizer)
    iterate(optimizer, slopes.loss(with_nonfinite(slopes.draw(rng), "last", math.inf)), scaler)
    new = [key for key in only("state/", snapshot(optimizer)) if key not in before]
    case.note("state entries that a skipped first step created", new)


@contract("AMP-OPTIMIZER-022")
@over_optimizers()
def test_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for explicit in ROUTES:
        first = LinearLoss.make(kind.gradients, target.device, rng)
        second = first.copy()
        skipping, straight = build(case, kind, first), build(case, kind, second)
        scalers = [torch.amp.GradScaler(target.device_type) for _ in range(2)]
        clean = [first.draw(rng) for _ in range(3)]
        for number, slope in enumerate(clean):
            for bad, place in zip(list(NON_FINITE.values())[:number], ("last", "first"), strict=False):
                iterate(
                    skipping, first.loss(with_nonfinite(first.draw(rng), place, bad)), scalers[0], explicit=explicit
                )
            iterate(skipping, first.loss(slope), scalers[0], explicit=explicit)
            iterate(straight, second.loss(slope), scalers[1], explicit=explicit)
            seen = {**snapshot(skipping), **gradients(first.parameters)}
            expected = {**snapshot(straight), **gradients(second.parameters)}
            what = f"differences from a run without inf after step {number + 1}"
            case.equal(f"{what} ({'unscale_ first' if explicit else 'step alone'})", differences(seen, expected), [])
    case.equal("scale after three skips", scalers[0].get_scale(), 2.0**13)


@contract("AMP-OPTIMIZER-022", on="accelerator")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.id) for kind in ALL if kind.first and kind.accepts("capturable")]
)
def test_capturable_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    first = LinearLoss.make(kind.gradients, target.device, rng)
    second = first.copy()
    skipping, straight = build(case, kind, first, capturable=True), build(case, kind, second, capturable=True)
    scaler = torch.amp.GradScaler(target.device_type)
    for number in range(3):
        slope = first.draw(rng)
        iterate(skipping, first.loss(with_nonfinite(slope, "last", math.inf)), scaler)
        iterate(skipping, first.loss(slope), scaler)
        iterate(straight, second.loss(slope))
        changed = differences(snapshot(skipping), snapshot(straight))
        case.equal(f"differences from a run without inf after step {number + 1}", changed, [])


@contract("AMP-OPTIMIZER-022")
@over_optimizers(quick=("SGD",))
def test_first_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    first = LinearLoss.make(kind.gradients, target.device, rng)
    second = first.copy()
    skipping, straight = build(case, kind, first), build(case, kind, second)
    scaler = torch.amp.GradScaler(target.device_type)
    slope = first.draw(rng)
    with uninitialised_memory_is_nan():
        for bad in NON_FINITE.values():
            iterate(skipping, first.loss(with_nonfinite(slope, "last", bad)), scaler)
        for _ in range(2):
            iterate(skipping, first.loss(slope), scaler)
            iterate(straight, second.loss(slope))
    changed = differences(snapshot(skipping), snapshot(straight))
    case.equal("differences from a run without inf after two steps", changed, [])


@contract("AMP-OPTIMIZER-022")
@over_optimizers()
def test_resumed_from_checkpoint(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    clean = slopes.draw(rng)
    iterate(optimizer, slopes.loss(clean), scaler)
    iterate(optimizer, slopes.loss(with_nonfinite(clean, "first", math.nan)), scaler)
    saved = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
    resumed = slopes.copy()
    again, scaler_again = build(case, kind, resumed), torch.amp.GradScaler(target.device_type)
    again.load_state_dict(saved[0])
    scaler_again.load_state_dict(saved[1])
    for slope in (slopes.draw(rng), with_nonfinite(clean, "last", math.inf), slopes.draw(rng)):
        iterate(optimizer, slopes.loss(slope), scaler)
        iterate(again, resumed.loss(slope), scaler_again)
    # load_state_dict moves the state, except `step`, to the parameter's device
    # (_process_value_according_to_param_policy in torch/optim/optimizer.py); NAdam creates mu_product on the CPU.
    seen, expected = on_host(snapshot(again)), on_host(snapshot(optimizer))
    case.equal("differences from the uninterrupted run", differences(seen, expected), [])
    case.equal("state of the resumed scaler", scaler_again.state_dict(), scaler.state_dict())


@contract("AMP-OPTIMIZER-077")
@over_optimizers(quick=("SGD", "Adam", "Adagrad"), variants=None)
def test_step_counters(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    taken = 0
    for bad in (math.inf, None, math.nan, math.nan, None, -math.inf, None, math.inf):
        slope = slopes.draw(rng)
        if bad is not None and taken == 0 and kind.fused and kind.arguments.get("momentum"):
            continue  # AMP-OPTIMIZER-022: fused SGD uses uninitialised momentum after a skipped first step
        iterate(
            optimizer,
            slopes.loss(slope if bad is None else with_nonfinite(slope, "last", bad)),
            scaler,
            explicit=bool(taken % 2),
        )
        taken += bad is None
        moving = [optimizer.state.get(parameter, {}) for parameter in slopes.moving]
        counts = {float(state["step"]) for state in moving if "step" in state}
        case.equal(f"steps counted after {taken} taken", sorted(counts - {float(taken)}), [])
    counters = len(only("state/", snapshot(optimizer)))
    case.note("entries of state", counters)
