"""The third-party optimizers: the step that they take, and what they record."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from conformance.workloads.third_party_optimizers import Ordinary, SelfScaling, TakesScaler
from tests.scaler import vendor_scaler


def _parameter(gradient: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), gradient)
    return parameter


@pytest.mark.parametrize("kind", [Ordinary, SelfScaling, TakesScaler])
def test_without_a_scaler_each_takes_the_step(kind: type[Ordinary]) -> None:
    parameter, idle = _parameter(0.25), torch.nn.Parameter(torch.ones(1))

    kind([{"params": [parameter]}, {"params": [idle]}]).step()

    assert (parameter.tolist(), idle.tolist()) == ([0.75, 0.75], [1.0])


def test_ordinary_keeps_arguments_and_names_what_it_sees() -> None:
    optimizer = Ordinary([_parameter(1.0)])
    optimizer.answer = "a value"

    assert optimizer.step(1, named=2) == "a value"
    optimizer.found_inf = torch.zeros(())
    optimizer.step()

    assert optimizer.calls == [((1,), {"named": 2}), ((), {})]
    assert optimizer.received == [[], ["found_inf"]]


def test_self_scaling_divides_by_the_scale_and_skips_by_the_flag() -> None:
    parameter = _parameter(1.0)
    optimizer = SelfScaling([parameter])

    for scale, flag in ((torch.tensor(4.0), 0.0), (torch.tensor(4.0), 2.0), (None, 0.0)):
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(flag)
        assert optimizer.step() == "stepped"

    assert optimizer.received == [(4.0, 0.0), (4.0, 2.0), (None, 0.0)]
    assert parameter.tolist() == [-0.25, -0.25]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("maker", [torch.amp.GradScaler, vendor_scaler.GradScaler])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("value", [2.0, math.inf])
def test_older_protocol_asks_the_scaler(value: float, explicit: bool, maker: Any) -> None:
    parameter, scaler = _parameter(value), maker("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    optimizer = TakesScaler([parameter])
    if explicit:
        scaler.unscale_(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)

    found = 0.0 if value == 2.0 else 1.0
    assert optimizer.received == [(scaler, [found] if explicit else [found, found])]
    assert parameter.tolist() == ([1.0, 1.0] if found else [0.75, 0.75])
