"""Check what step() returns and forwards to optimizer.step(), and that it rejects closures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.optimizer_classes import present
from ...workloads.third_party_optimizers import (
    Ordinary,
    SelfScaling,
    owning,
    parameters_of,
)
from .optimizer_configs import OptimizerConfig, takes_closure
from .support import BAD, ROUTES, iterate, over_optimizers, started, twins


@contract("AMP-OPTIMIZER-040")
@pytest.mark.parametrize("maker", [Ordinary, SelfScaling], ids=["ordinary", "self-scaling"])
def test_return_value(case: Case, target: Target, rng: torch.Generator, maker: Callable[[Any], Ordinary]) -> None:
    for explicit in ROUTES:
        for answer in (None, 0.0, "a value", torch.ones(2)):
            slopes = LinearLoss.make("dense", target.device, rng)
            optimizer, scaler = maker(slopes.groups()), torch.amp.GradScaler(target.device_type)
            optimizer.answer = answer
            seen = iterate(optimizer, slopes.loss(slopes.draw(rng)), scaler, explicit=explicit)
            case.true("step() returns the object that optimizer.step() returned", seen is answer, seen)


@contract("AMP-OPTIMIZER-040")
@BAD
def test_skip_returns_none(case: Case, target: Target, rng: torch.Generator, bad: float) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = Ordinary(slopes.groups()), torch.amp.GradScaler(target.device_type)
        optimizer.answer = "a value"
        loss = slopes.loss(with_nonfinite(slopes.draw(rng), "last", bad))
        case.equal("result of a skipped step()", iterate(optimizer, loss, scaler, explicit=explicit), None)
        case.equal("calls of optimizer.step()", len(optimizer.calls), 0)


@contract("AMP-OPTIMIZER-042")
@pytest.mark.parametrize("maker", [Ordinary, SelfScaling], ids=["ordinary", "self-scaling"])
def test_arguments_forwarded(
    case: Case, target: Target, rng: torch.Generator, maker: Callable[[Any], Ordinary]
) -> None:
    for enabled in (True, False):
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer = maker(slopes.groups())
        scaler = torch.amp.GradScaler(target.device_type, enabled=enabled)
        scaler.scale(slopes.loss(slopes.draw(rng))).backward()
        scaler.step(optimizer, 1, "two", third=3.0, fourth=None)
        expected = [((1, "two"), {"third": 3.0, "fourth": None})]
        case.equal(f"arguments of optimizer.step() (enabled={enabled})", optimizer.calls, expected)


@contract("AMP-OPTIMIZER-082")
def test_closures(case: Case, target: Target, rng: torch.Generator) -> None:
    for name in filter(takes_closure, present()):
        slopes = LinearLoss.make("dense", target.device, rng)
        slope = slopes.draw(rng)
        optimizer = getattr(torch.optim, name)(list(slopes.parameters))
        scaler = torch.amp.GradScaler(target.device_type)

        def closure(optimizer: Any = optimizer, slopes: LinearLoss = slopes, slope: Any = slope) -> torch.Tensor:
            optimizer.zero_grad()
            loss = slopes.loss(slope)
            loss.backward()
            return loss

        before = snapshot(optimizer)
        scaler.scale(slopes.loss(slope)).backward()
        step = functools.partial(scaler.step, optimizer, closure=closure)
        case.raises(f"{name} with a closure", RuntimeError, step, names=("closure",))
        case.equal("differences after the rejected step", differences(snapshot(optimizer), before), [])
        off = torch.amp.GradScaler(target.device_type, enabled=False)
        loss = off.step(optimizer, closure=closure)
        case.true("control: with a disabled scaler it steps", bool(differences(snapshot(optimizer), before)), loss)


@contract("AMP-OPTIMIZER-083")
def test_skip_needs_no_closure(case: Case, target: Target, rng: torch.Generator) -> None:
    for name in filter(takes_closure, present()):
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = (
            getattr(torch.optim, name)(list(slopes.parameters)),
            torch.amp.GradScaler(target.device_type),
        )
        before = snapshot(optimizer)
        bad = with_nonfinite(slopes.draw(rng), "last", math.nan)
        case.equal("result of the skipped step", iterate(optimizer, slopes.loss(bad), scaler), None)
        case.equal(f"differences after a skipped step of {name}", differences(snapshot(optimizer), before), [])


@contract("AMP-OPTIMIZER-082")
def test_closure(case: Case, target: Target) -> None:
    optimizer = owning(torch.full((), 65536.0, device=target.device))
    scaler = started(target)
    ran: list[int] = []
    case.raises(
        "step(closure=...)",
        RuntimeError,
        lambda: scaler.step(optimizer, closure=lambda: ran.append(1)),
        names=("closure",),
    )
    case.equal("calls of the optimizer and of the closure", (len(optimizer.calls), len(ran)), (0, 0))
    case.equal("the gradient, still scaled", parameters_of(optimizer)[0].grad.item(), 65536.0)


@contract("AMP-OPTIMIZER-082")
@over_optimizers(variants=None)
def test_closure_refused_by_every_optimizer(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    before = snapshot(optimizer)
    scaler.scale(slopes.loss(slope)).backward()
    for closure in (None, lambda: torch.ones(())):
        step = functools.partial(scaler.step, optimizer, closure=closure)
        case.raises(
            f"step(closure={'None' if closure is None else 'a function'})", RuntimeError, step, names=("closure",)
        )
    case.equal("differences after the rejected calls", differences(snapshot(optimizer), before), [])
    case.equal("result of step() without a closure", scaler.step(optimizer), None)
    iterate(plain, twin.loss(slope))
    case.equal("differences from fp32 after it", differences(snapshot(optimizer), snapshot(plain)), [])
