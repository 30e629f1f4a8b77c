"""The small programs P1 to P4 as workloads, and torch.amp's current and deprecated names to run them with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...workloads.linear import linear
from ...workloads.mlp import initialise, mlp
from ...workloads.training import Workload


@dataclass(frozen=True)
class Spelling:
    """The autocast and GradScaler of one device type, by their current or deprecated names."""

    region: Callable[[torch.dtype, bool], AbstractContextManager[object]]
    scaler: Callable[..., torch.amp.GradScaler]


def new_spelling(device_type: str) -> Spelling:
    """Return `torch.autocast(device_type, ...)` and `torch.amp.GradScaler(device_type, ...)`."""
    return Spelling(
        lambda dtype, enabled: torch.autocast(device_type, dtype=dtype, enabled=enabled),
        lambda **options: torch.amp.GradScaler(device_type, **options),
    )


def old_spelling(device_type: str) -> Spelling | None:
    """Return `torch.cuda.amp.autocast(...)` and so on, without their deprecation warnings; None if there is none."""
    module = {"cuda": torch.cuda.amp, "cpu": torch.cpu.amp}.get(device_type)
    if module is None:
        return None

    def quietly(make: Callable[..., Any], **options: object) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return make(**options)

    return Spelling(
        lambda dtype, enabled: quietly(module.autocast, dtype=dtype, enabled=enabled),
        lambda **options: quietly(module.GradScaler, **options),
    )


def smallest(device: torch.device, generator: torch.Generator) -> Workload:
    """Return P3: 20 samples of 10 features, Linear 10-1, SGD 0.1, squared error; an epoch is one batch."""
    inputs = torch.randn(20, 10, generator=generator)
    target = 0.2 * inputs.sum(1, keepdim=True) + 0.1 * torch.randn(20, 1, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(10, 1))
    initialise(model, generator)
    model.to(device)
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.nn.functional.mse_loss,
        [(inputs.to(device), target.to(device))],
    )


def typical(device: torch.device, generator: torch.Generator) -> Workload:
    """Return P4: the typical loop for a classifier of 32 features by a 32-64-8 perceptron, SGD with momentum."""
    rows = torch.randn(4 * 32, 32, generator=generator)
    labels = (rows @ torch.randn(32, 8, generator=generator)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    initialise(model, generator)
    model.to(device)
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.nn.functional.cross_entropy,
        [(x.to(device), y.to(device)) for x, y in zip(rows.split(32), labels.split(32), strict=True)],
    )


PROGRAMS: Mapping[str, Callable[[torch.device, torch.Generator], Workload]] = {
    "P1": linear,
    "P2": mlp,
    "P3": smallest,
    "P4": typical,
}
"""The programs by the names that contracts use."""
