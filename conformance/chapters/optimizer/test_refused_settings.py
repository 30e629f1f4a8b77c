"""Check that optimizers refuse settings that have no meaning, and parameters that they cannot step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ...harness.check import Case, contract
from ...harness.targets import Target
from .support import REFUSALS

_OF_ADAM: Mapping[str, tuple[Any, ...]] = {
    "lr": (-1.0,),
    "eps": (-1.0,),
    "betas": ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)),
    "weight_decay": (-1.0,),
}
SETTINGS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "Adam": _OF_ADAM,
    "AdamW": _OF_ADAM,
    "NAdam": {**_OF_ADAM, "momentum_decay": (-1.0,)},
    "RAdam": _OF_ADAM,
    "Adamax": _OF_ADAM,
    "SparseAdam": {name: values for name, values in _OF_ADAM.items() if name != "weight_decay"},
    "SGD": {"lr": (-1.0,), "momentum": (-1.0,), "weight_decay": (-1.0,)},
    "RMSprop": {"lr": (-1.0,), "eps": (-1.0,), "momentum": (-1.0,), "weight_decay": (-1.0,), "alpha": (-1.0,)},
    "Adadelta": {"lr": (-1.0,), "rho": (2.0, -1.0), "eps": (-1.0,), "weight_decay": (-1.0,)},
    "Adagrad": {
        "lr": (-1.0,),
        "lr_decay": (-1.0,),
        "weight_decay": (-1.0,),
        "initial_accumulator_value": (-1.0,),
        "eps": (-1.0,),
    },
    "ASGD": {"lr": (-1.0,), "weight_decay": (-1.0,)},
    "Rprop": {"lr": (-1.0,), "etas": ((1.5, 1.2), (0.5, 0.9))},
    "Adafactor": {
        "lr": (-1.0,),
        "beta2_decay": (1.0,),
        "eps": ((-1.0, 1e-3), (None, -1.0)),
        "d": (0.5,),
        "weight_decay": (-1.0,),
    },
    "LBFGS": {"lr": (-1.0,)},
}
"""Values that the constructor of an optimizer refuses, by its name and the name of the setting."""

# Of a parameter and another: calls that no optimizer can follow.
CALLS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "Nesterov momentum of 0": lambda p, q: optim.SGD([p], lr=0.1, nesterov=True),
    "Nesterov momentum with dampening": lambda p, q: optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.1, nesterov=True),
    "no parameters": lambda p, q: optim.Adam([]),
    "a parameter that is in no list": lambda p, q: optim.Adam(p),
    "a result": lambda p, q: optim.Adam([p * 2]),
    "a number among parameters": lambda p, q: optim.Adam([p, 3.0]),
    "groups and parameters in one list": lambda p, q: optim.Adam([{"params": [p]}, q]),
    "a rate of two elements": lambda p, q: optim.Adam([p], lr=torch.ones(2)),
    "foreach and fused": lambda p, q: optim.Adam([p], foreach=True, fused=True),
    "fused and differentiable": lambda p, q: optim.SGD([p], lr=0.1, fused=True, differentiable=True),
    "a parameter of two groups": lambda p, q: optim.Adam([{"params": [p]}, {"params": [q, p]}]),
    "a parameter that is added again": lambda p, q: optim.Adam([p, q]).add_param_group({"params": [q]}),
    "a set of parameters": lambda p, q: optim.Adam([p]).add_param_group({"params": {q}}),
}


def _taken(call: Callable[[], Any]) -> str | None:
    """Return what a call returns where it is not refused, or how else it fails."""
    try:
        return repr(call()).splitlines()[0]
    except REFUSALS:
        return None
    except Exception as error:
        return f"raised {type(error).__name__}"


@contract("AMP-OPTIMIZER-136")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_without_a_meaning(case: Case, target: Target, name: str) -> None:
    make, parameter = getattr(optim, name), nn.Parameter(torch.ones(2, device=target.device))
    make([parameter])  # with the settings that it has by default
    accepted: dict[str, str] = {}
    for setting, values in SETTINGS[name].items():
        for value in values:
            if found := _taken(functools.partial(make, [parameter], **{setting: value})):
                accepted[f"{setting}={value}"] = found
    case.equal("settings that are taken", accepted, {})


@contract("AMP-OPTIMIZER-136")
def test_calls_that_cannot_be_followed(case: Case, target: Target) -> None:
    accepted: dict[str, str] = {}
    for name, call in CALLS.items():
        pair = [nn.Parameter(torch.ones(2, device=target.device)) for _ in range(2)]
        if found := _taken(functools.partial(call, *pair)):
            accepted[name] = found
    case.equal("calls that are taken", accepted, {})
