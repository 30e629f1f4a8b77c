"""torch.amp as the precision of the recipes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class TorchAmp:
    """The precision of torch.amp; its regions have the weight cache that `cache_enabled` asks for."""

    def __init__(self, device_type: str, dtype: torch.dtype, *, cache_enabled: bool | None = None) -> None:
        self.dtype = dtype
        self._device_type = device_type
        self._cache_enabled = cache_enabled
        device = {"device_type": device_type}

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
        return torch.autocast(
            self._device_type, dtype=dtype or self.dtype, enabled=enabled, cache_enabled=self._cache_enabled
        )

    def scaler(self, init_scale: float, growth_interval: int = 2000) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, init_scale=init_scale, growth_interval=growth_interval)
