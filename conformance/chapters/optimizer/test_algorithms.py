"""Check the optimizers without a fused implementation against their documented algorithms in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .further_updates import FURTHER
from .support import ALL, demand

# Settings under which every term of an update shows within a few steps, and the two sides of every condition are met.
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "ASGD": (
        {"lr": 0.25, "lambd": 0.0625, "t0": 2.0},
        {"lr": 0.25, "t0": 1.0, "weight_decay": 0.125, "maximize": True},
    ),
    "Adadelta": ({"lr": 0.25, "rho": 0.74}, {"lr": 0.5, "eps": 0.0625, "weight_decay": 0.125, "maximize": True}),
    "Adamax": ({"lr": 0.25}, {"lr": 0.25, "betas": (0.75, 0.5), "eps": 0.0625, "weight_decay": 0.125}),
    "NAdam": (
        {"lr": 0.25, "betas": (0.75, 0.875)},
        {"lr": 0.25, "momentum_decay": 0.5, "weight_decay": 0.125, "decoupled_weight_decay": True},
    ),
    "RAdam": (
        {"lr": 0.25, "betas": (0.75, 0.99)},
        {"lr": 0.25, "weight_decay": 0.125, "decoupled_weight_decay": True, "maximize": True},
    ),
    "RMSprop": (
        {"lr": 0.25, "alpha": 0.74, "momentum": 0.5, "centered": True},
        {"lr": 0.25, "eps": 0.0625, "weight_decay": 0.125, "maximize": True},
    ),
    "Rprop": (
        {"lr": 0.25, "step_sizes": (0.125, 0.5)},
        {"lr": 0.25, "etas": (0.25, 1.5), "maximize": True},
    ),
}  # fmt: skip
STEPS, LATE = 9, 3  # the second parameter has its first gradient in step LATE, so that two steps are counted at once
ELEMENTS = 5
# Of the way that an element went: 512 roundings of fp32, which no sum of these steps, of one sign each, amplifies more.
OF_THE_WAY = 2.0**-15
OF_THE_ELEMENT = 4 * 2.0**-24  # for each step


@contract("AMP-OPTIMIZER-032")
@pytest.mark.parametrize("name", SETTINGS)
def test_further_algorithms(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    """Step twice over parameters of which one is late; the last element has gradients of zero alone."""
    case.require_arithmetic(target, torch.float32)
    judged = 0
    for kind in ALL:
        if kind.optimizer != name or not kind.first:
            continue
        demand(case, kind, target.device)
        for options in SETTINGS[name]:
            judged += 1
            far = _far(target, rng, name, {**options, **kind.flags})
            case.equal(f"{kind.implementation}, {options}: errors beyond their bounds", far, {})
    case.at_least("settings judged", judged, 1)


def _far(target: Target, rng: torch.Generator, name: str, options: dict[str, Any]) -> dict[str, float]:
    """Return by parameter and element the errors after the steps, in units of their bounds, that are beyond them."""
    began = [torch.rand(ELEMENTS, generator=rng) + 0.5 for _ in range(2)]
    drawn = torch.rand(STEPS, 2, ELEMENTS, generator=rng) + 0.25
    if name == "Rprop":  # the signs of its gradients decide
        drawn *= torch.randint(0, 2, drawn.shape, generator=rng) * 2 - 1
    drawn[..., -1] = 0
    parameters = [torch.nn.Parameter(value.clone().to(target.device)) for value in began]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8)
    for step in range(STEPS):
        for overflow in (step == 1, False)[step != 1 :]:
            optimizer.zero_grad()
            moving = parameters if step >= LATE else parameters[:1]
            weights = [slope.to(target.device) for slope in drawn[step]]
            loss = sum((p * weight).sum() for p, weight in zip(moving, weights, strict=False))
            assert isinstance(loss, torch.Tensor)
            scaler.scale(loss * math.inf if overflow else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = {}
    for number, (parameter, start) in enumerate(zip(parameters, began, strict=True)):
        seen, averages = parameter.tolist(), optimizer.state[parameter].get("ax")
        for place, value in enumerate(start.tolist()):
            slopes = drawn[LATE * number :, number, place].tolist()
            state: dict[str, float] = {}
            path = [value]
            for step, slope in enumerate(slopes, 1):
                path.append(FURTHER[name](path[-1], slope, step, state, options))
            way = sum(abs(b - a) for a, b in itertools.pairwise(path))
            bound = OF_THE_WAY * way + STEPS * OF_THE_ELEMENT * max(map(abs, path))
            pairs = {"": (seen[place], path[-1])}
            if averages is not None:
                pairs[", average"] = (averages[place].item(), state["average"])
            for what, (ours, exact) in pairs.items():
                if not (share := abs(ours - exact) / bound) <= 1:
                    found[f"parameter {number}, element {place}{what}"] = share
    return found
