"""Helpers of the recipe checks: random data, comparison of weights, the dtypes of a check, torch.amp as a precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from .recipes import Draw, Precision, Recipe, Step


def same_weights(case: Case, what: str, seen: torch.nn.Module, expected: torch.nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in seen.named_parameters():
        case.identical(f"{what}: {name}", parameter.detach(), theirs[name].detach())


def normal(target: Target, seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (0.4 * torch.randn(shape, generator=generator)).to(target.device)


def dtypes_of(case: Case, target: Target) -> tuple[torch.dtype, ...]:
    """Return the amp dtypes to check: both, but at level quick one in turn, except for AMP-RECIPE-002."""
    found = case.supported(target)
    number = int(case.contract.id[-3:])
    return found if case.level != "quick" or number == 2 else (found[number % len(found)],)


class TorchAmp:
    """The precision of torch.amp."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._device_type = target.device_type
        device = {"device_type": self._device_type}

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(**device)
            def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(left, right)
                return left.mm(right)

            @staticmethod
            @torch.amp.custom_bwd(**device)
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                left, right = ctx.saved_tensors
                return gradient.mm(right.t()), left.t().mm(gradient)

        class Cube(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(**device, cast_inputs=torch.float32)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * x * x

            @staticmethod
            @torch.amp.custom_bwd(**device)
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                return gradient * 3 * x * x

        self.product, self.cube = Product.apply, Cube.apply

    def region(self, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, dtype=dtype or self.dtype, enabled=enabled)

    def scaler(self, init_scale: float, growth_interval: int = 2000) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, init_scale=init_scale, growth_interval=growth_interval)


def run(recipe: Recipe, amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Yield the steps of a program from a fixed random state, with deterministic convolutions."""
    torch.manual_seed(3)
    with repeatable_convolutions():
        yield from recipe(amp, draw, steps)
