"""Check that a disabled scaler is a no-op."""

from __future__ import annotations

import math

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...workloads.third_party_optimizers import answering, owning, parameters_of
from .support import DUPLICATES, RESUMED


def disabled(target: Target) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(target.device_type, enabled=False)


@contract("AMP-SCALE-100")
def test_disabled_scale(case: Case, target: Target) -> None:
    scaler = disabled(target)
    loss = torch.tensor(1.5, device=target.device)
    for what, outputs in (("tensor", loss), ("list", [loss]), ("tuple", (loss, [loss])), ("text", "no tensor")):
        case.true(f"scale() of a {what} returns the same object", scaler.scale(outputs) is outputs)
    case.equal("the loss", loss.item(), 1.5)


@contract("AMP-SCALE-101")
def test_disabled_step(case: Case, target: Target) -> None:
    scaler = disabled(target)
    for value in (2.0, math.inf, math.nan):
        optimizer = owning(torch.tensor(value, device=target.device), kind=lambda p: answering(p, "answer"))
        case.equal("step() returns", scaler.step(optimizer, 1, closure=2), "answer")
        case.equal("arguments of optimizer.step", optimizer.calls, [((1,), {"closure": 2})])
        case.identical("the parameter", parameters_of(optimizer)[0], torch.tensor(-value))
        scaler.step(optimizer)
        case.equal("calls after a second step", len(optimizer.calls), 2)


@contract("AMP-SCALE-102")
def test_disabled_unscale_and_update(case: Case, target: Target) -> None:
    scaler = disabled(target)
    optimizer = owning(
        torch.tensor([2.0, math.inf], device=target.device),
        torch.ones(1, dtype=case.supported(target)[0], device=target.device),
    )
    for what, call in (
        ("unscale_()", lambda: scaler.unscale_(optimizer)),
        ("unscale_() again", lambda: scaler.unscale_(optimizer)),
        ("update()", scaler.update),
        ("update(2.0)", lambda: scaler.update(2.0)),
    ):
        case.equal(f"{what} returns", call(), None)
        case.equal(f"gradients after {what}", parameters_of(optimizer)[0].grad.tolist(), [2.0, math.inf])
    case.equal("get_scale()", scaler.get_scale(), 1.0)


@contract("AMP-SCALE-103")
def test_disabled_reports(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=48.0, enabled=False)
    case.equal("is_enabled()", scaler.is_enabled(), False)
    case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("state_dict()", scaler.state_dict(), {})


@contract("AMP-SCALE-104")
def test_disabled_load(case: Case, target: Target) -> None:
    scaler = disabled(target)
    for state in (dict(RESUMED), {}):
        case.equal("load_state_dict() returns", scaler.load_state_dict(state), None)
        case.equal("state_dict()", scaler.state_dict(), {})
        case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("enabled when pickled and loaded", DUPLICATES["pickle"](scaler).is_enabled(), False)


@contract("AMP-SCALE-105")
@pytest.mark.parametrize("getter", ["get_growth_factor", "get_backoff_factor", "get_growth_interval"])
def test_disabled_getters(case: Case, target: Target, getter: str) -> None:
    case.equal("control: get_scale()", disabled(target).get_scale(), 1.0)
    seen = "a number"
    try:
        getattr(disabled(target), getter)()
    except AttributeError as error:
        seen = f"AttributeError: {error}"
    case.equal(f"{getter}() of a disabled scaler", seen, "a number")


@contract("AMP-SCALE-106")
@pytest.mark.parametrize(
    "settings",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_factor": 0.5, "backoff_factor": 2.0, "init_scale": 0.0}],
    ids=["growth", "backoff", "all"],
)
def test_disabled_settings(case: Case, target: Target, settings: dict[str, float]) -> None:
    case.raises(
        "an enabled scaler with these settings (control)",
        AssertionError,
        lambda: torch.amp.GradScaler(target.device_type, **settings),
    )
    scaler = torch.amp.GradScaler(target.device_type, enabled=False, **settings)
    case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("state_dict()", scaler.state_dict(), {})
