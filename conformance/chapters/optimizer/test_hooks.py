"""Check that step hooks run with the steps that are taken, and get unscaled gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...workloads.gradients import NON_FINITE
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.third_party_optimizers import (
    Ordinary,
)
from .optimizer_configs import OptimizerConfig
from .support import BOTH, BY_ROUTE, PROTOCOL, ROUTES, build, clones, iterate, left_on, over_optimizers


@contract("AMP-OPTIMIZER-070")
@over_optimizers(lambda kind: not kind.fused, variants=None)
def test_hooks_follow_the_step(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    slope = slopes.draw(rng)
    for bad in NON_FINITE.values():
        iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", bad)), scaler)
    case.equal("hooks that ran in three skipped steps", ran, [])
    iterate(optimizer, slopes.loss(slope), scaler)
    case.equal("hooks that ran in a clean step", ran, ["pre", "post"])


@contextmanager
def hooked(optimizer: Any, ran: list[str]) -> Iterator[None]:
    """Register global hooks and the optimizer's own, which append their names to `ran`."""
    handles = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("global pre")),
        optimizer.register_step_pre_hook(lambda *_: ran.append("own pre")),
        optimizer.register_step_post_hook(lambda *_: ran.append("own post")),
        register_optimizer_step_post_hook(lambda *_: ran.append("global post")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


ORDER = ["global pre", "own pre", "own post", "global post"]


@contract("AMP-OPTIMIZER-071")
@over_optimizers(lambda kind: kind.gradients == "dense", variants=None, fused="quick")
@BY_ROUTE
def test_a_skip_is_seen_from_outside(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, explicit: bool
) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    ran: list[str] = []
    taken = optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        ran.append("wrapper")
        return taken(*args, **kwargs)

    slope = slopes.draw(rng)
    with hooked(optimizer, ran), mock.patch.object(optimizer, "step", wrapped):
        for place, bad in (("first", math.nan), ("last", math.inf)):
            iterate(optimizer, slopes.loss(with_nonfinite(slope, place, bad)), scaler, explicit=explicit)
            case.equal(f"what ran in a step that was skipped for {bad} in the {place} gradient", ran, [])
            ran.clear()
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
    case.equal("what ran in a clean step", ran, ["wrapper", *ORDER])


@contract("AMP-OPTIMIZER-074")
@over_optimizers(lambda kind: not kind.scales_itself, variants=None)
def test_global_hooks(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make(kind.gradients, target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        ran: list[str] = []
        slope = slopes.draw(rng)
        with hooked(optimizer, ran):
            iterate(optimizer, slopes.loss(with_nonfinite(slope, "first", math.nan)), scaler, explicit=explicit)
            case.equal("hooks that ran in a skipped step", ran, [])
            iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        case.equal("hooks that ran in a clean step", ran, ORDER)


@contract("AMP-OPTIMIZER-075")
@BOTH
def test_what_hooks_see(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        seen: list[tuple[str, float, list[str]]] = []

        def look(when: str, slopes: LinearLoss = slopes, seen: Any = seen) -> Callable[..., None]:
            first = slopes.moving[0]
            return lambda one, args, kwargs: seen.append((when, first.grad.flatten()[0].item(), left_on(one)))

        optimizer.register_step_pre_hook(look("before"))
        optimizer.register_step_post_hook(look("after"))
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        true = slope[0].flatten()[0].item()
        names = list(PROTOCOL) if kind.scales_itself else []
        before = true if explicit or not kind.scales_itself else true * 65536
        case.equal(
            "gradient and attributes before and after", seen, [("before", before, names), ("after", true, names)]
        )


@contract("AMP-OPTIMIZER-075")
@BY_ROUTE
def test_hooks_may_change_gradients_and_arguments(
    case: Case, target: Target, rng: torch.Generator, explicit: bool
) -> None:
    slopes = LinearLoss.make("dense", target.device, rng)
    optimizer, scaler = Ordinary(slopes.groups()), torch.amp.GradScaler(target.device_type)

    def halve(one: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for parameter in slopes.moving:
            parameter.grad.mul_(0.5)
        return (one, "added"), {"named": 1}

    optimizer.register_step_pre_hook(halve)
    start, slope = clones(slopes), slopes.draw(rng)
    iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
    case.equal("arguments of step()", optimizer.calls, [(("added",), {"named": 1})])
    for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
        case.identical(f"parameter {number}, against p - g / 2", parameter, began - gradient * 0.5)


@contract("AMP-OPTIMIZER-127")
def test_hooks_of_states(case: Case, target: Target) -> None:
    """Save and load with hooks that tell that they ran, and of which two change the rate that is saved or loaded."""
    made = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device=target.device))], lr=0.25) for _ in range(2)]
    ran: list[str] = []

    def halved(place: str) -> Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]]:
        def change(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            ran.append(place)
            groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
            return {**state, "param_groups": groups}

        return change

    saving, loading = made
    saving.register_state_dict_pre_hook(lambda *_: ran.append("before saving"))
    saving.register_state_dict_post_hook(halved("after saving"))
    saving.register_state_dict_pre_hook(lambda *_: ran.append("first"), prepend=True)
    loading.register_load_state_dict_pre_hook(halved("before loading"))
    loading.register_load_state_dict_post_hook(lambda *_: ran.append("after loading"))
    loading.register_load_state_dict_post_hook(lambda *_: ran.append("last"))
    state = saving.state_dict()
    loading.load_state_dict(state)
    order = ["first", "before saving", "after saving", "before loading", "after loading", "last"]
    case.equal("hooks that ran, in order", ran, order)
    rates = [saving.param_groups[0]["lr"], state["param_groups"][0]["lr"], loading.param_groups[0]["lr"]]
    case.equal(
        "rates of the optimizer that was saved, its state and the one that loaded it", rates, [0.25, 0.125, 0.0625]
    )
