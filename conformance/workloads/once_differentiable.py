"""A custom function whose backward refuses a second derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class DoubledOnce(torch.autograd.Function):
    """Twice the input, with a backward that is marked once_differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return 2 * slope
