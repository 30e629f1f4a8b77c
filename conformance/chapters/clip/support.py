"""Helpers of the clipping checks: a workload with chosen gradients, its scaler and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ...harness.check import Case, deep
from ...harness.targets import Target
from ...workloads.linear_loss import LinearLoss

NORMS = pytest.mark.parametrize(
    "norm_type",
    [
        *(pytest.param(p, id=name) for name, p in {"2": 2.0, "inf": math.inf}.items()),
        *(deep("standard", p, id=name) for name, p in {"1": 1, "half": 0.5, "3": 3.0, "named-inf": "inf"}.items()),
    ],
)

FOREACH = pytest.mark.parametrize(
    "foreach",
    [pytest.param(None, id="auto"), pytest.param(False, id="for-loop"), deep("standard", True, id="foreach")],
)

OPTIMIZERS = pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])

# Elements per block of the multi-tensor kernels: kChunkSize of ATen/native/cuda/MultiTensorApply.cuh.
CHUNK = 65536
NONFINITE = "error_if_nonfinite|nonfinite|non-finite|infinite|inf|nan"
"""What an error about a norm that is not finite has to name: one of these, since its wording is no promise."""


def implementations(target: Target) -> tuple[bool | None, ...]:
    """Return the values of foreach that torch documents for the device."""
    return (None, False, True) if target.device_type in ("cpu", "cuda") else (None, False)


def workload(
    case: Case, target: Target, rng: torch.Generator, foreach: bool | None = None, *, fused: bool = False
) -> LinearLoss:
    """Return parameters with chosen gradients; end the case if this device has no foreach, or no fused, kernels."""
    slopes = LinearLoss.make("dense", target.device, rng)
    if target.device_type not in ("cpu", "cuda") and (foreach or fused):
        trial = slopes.copy()
        try:
            backward(trial, trial.draw(rng))
            torch.nn.utils.clip_grad_norm_(trial.parameters, 1.0, foreach=foreach)
            adam_over(trial, fused).step()
        except RuntimeError as error:
            case.unsupported(str(error))
    return slopes


def backward(slopes: LinearLoss, slope: list[torch.Tensor], scaler: torch.amp.GradScaler | None = None) -> None:
    """Set the gradients to the slopes, times the scale if there is a scaler."""
    for parameter in slopes.parameters:
        parameter.grad = None
    loss = slopes.loss(slope)
    (loss if scaler is None else scaler.scale(loss)).backward()


def adam_over(slopes: LinearLoss, fused: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Return Adam over the parameters."""
    return torch.optim.Adam(slopes.groups(), lr=0.25, fused=fused, **options)


def scaler_for(target: Target, scale: float = 65536.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(target.device_type, init_scale=scale)


def grads(slopes: LinearLoss) -> list[torch.Tensor]:
    """Return copies of the gradients of the moving parameters."""
    return [parameter.grad.detach().clone() for parameter in slopes.moving if parameter.grad is not None]


def all_identical(case: Case, what: str, seen: list[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        case.identical(f"{what}, tensor {number}", ours, theirs)
