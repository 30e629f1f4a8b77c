"""Check that calls in the wrong order raise and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.message_names import SCALED, STEPPED, UNSCALED
from ...workloads.third_party_optimizers import Ordinary, SelfScaling, give, owning, parameters_of
from .support import ROUTES, in_use, iterate, tracker


@contract("AMP-SCALE-080")
def test_unscale_twice(case: Case, target: Target) -> None:
    scaler, optimizer = in_use(target)
    scaler.unscale_(optimizer)
    case.raises("unscale_ twice", RuntimeError, lambda: scaler.unscale_(optimizer), names=(UNSCALED,))
    case.equal("gradients, unscaled once", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])
    scaler.step(optimizer)
    scaler.update()
    give(optimizer, 65536.0)
    scaler.unscale_(optimizer)
    case.equal("control: gradients of the next iteration", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-081")
@ROUTES
def test_unscale_after_step(case: Case, target: Target, explicit: bool) -> None:
    scaler, optimizer = in_use(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.raises("unscale_ after step", RuntimeError, lambda: scaler.unscale_(optimizer), names=(UNSCALED,))
    case.equal("gradients, unscaled once", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-082")
@pytest.mark.parametrize("value", [65536.0, math.inf], ids=["stepped", "skipped"])
@ROUTES
def test_step_twice(case: Case, target: Target, value: float, explicit: bool) -> None:
    scaler, optimizer = in_use(target)
    give(optimizer, value)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    ran = len(optimizer.calls)
    case.raises("step twice", RuntimeError, lambda: scaler.step(optimizer), names=(STEPPED,))
    case.equal("calls of optimizer.step", len(optimizer.calls), ran)
    scaler.update()
    give(optimizer, 1.0)
    scaler.step(optimizer)
    case.equal("control: calls of optimizer.step in the next iteration", len(optimizer.calls), ran + 1)


UNSTARTED: dict[str, Callable[[torch.amp.GradScaler, Ordinary], Any]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "update-to": lambda scaler, optimizer: scaler.update(2.0),
}


class IgnoresScaler(SelfScaling):
    """An optimizer of the older protocol that ignores the scaler that it receives."""

    def step(self, grad_scaler: Any = None) -> Any:
        self.calls.append(((), {"grad_scaler": grad_scaler}))


def expect_unstarted(case: Case, target: Target, name: str, kind: Callable[[Any], Any] = Ordinary) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    optimizer = owning(torch.full((2,), 65536.0, device=target.device), kind=kind)
    case.raises(f"{name} first", AssertionError, lambda: UNSTARTED[name](scaler, optimizer), names=(SCALED,))
    case.equal("calls of optimizer.step", len(optimizer.calls), 0)
    case.equal("gradients", parameters_of(optimizer)[0].grad.tolist(), [65536.0, 65536.0])


@contract("AMP-SCALE-083")
@pytest.mark.parametrize(
    "kind", [Ordinary, SelfScaling, IgnoresScaler], ids=["ordinary", "self-scaling", "takes-scaler"]
)
def test_step_before_scale(case: Case, target: Target, kind: Callable[[Any], Any]) -> None:
    expect_unstarted(case, target, "step", kind)


@contract("AMP-SCALE-084")
def test_unscale_before_scale(case: Case, target: Target) -> None:
    expect_unstarted(case, target, "unscale_")


@contract("AMP-SCALE-085")
@pytest.mark.parametrize("name", ["update", "update-to"])
def test_update_before_scale(case: Case, target: Target, name: str) -> None:
    expect_unstarted(case, target, name)


@contract("AMP-SCALE-086")
@pytest.mark.parametrize("used", [False, True], ids=["first", "second"])
def test_update_without_checks(case: Case, target: Target, used: bool) -> None:
    scaler, optimizer = in_use(target)
    if used:
        iterate(scaler, optimizer)
    before = (scaler.get_scale(), tracker(scaler))
    case.raises("update() with nothing checked", AssertionError, scaler.update)
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), before)


@contract("AMP-SCALE-087")
@ROUTES
def test_optimizer_without_gradients(case: Case, target: Target, explicit: bool) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0, growth_interval=1)
    idle, busy = (torch.nn.Parameter(torch.ones(2, device=target.device)) for _ in range(2))
    optimizers = [torch.optim.SGD([one], lr=0.5) for one in (idle, busy)]
    scaler.scale(busy.sum()).backward()
    for optimizer in optimizers:
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    case.equal("parameters without and with a gradient", (idle.tolist(), busy.tolist()), ([1.0, 1.0], [0.5, 0.5]))
    case.equal("scale after the iteration", scaler.get_scale(), 8.0)
