"""Custom autograd functions and operators with autocast rules, as parts of programs that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OWN = "amp_conformance_compile"


def product(device_type: str, cast_inputs: torch.dtype | None) -> Callable[..., torch.Tensor]:
    """Return a product as an autograd function with custom_fwd and custom_bwd."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return torch.mm(x, w)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return torch.mm(gradient, w.t()), torch.mm(x.t(), gradient)

    apply: Callable[..., torch.Tensor] = Product.apply
    return apply


TOLD = 1 + 2**-10 + 2**-20
"""A number that float32 holds, of which fp16 drops the last place and bf16 the last two."""


def told(device_type: str) -> int:
    """Return a number for whether autocast is enabled and for its dtype."""
    dtype = torch.get_autocast_dtype(device_type)
    number = 8 if dtype is torch.float16 else 16 if dtype is torch.bfloat16 else 32
    return number if torch.is_autocast_enabled(device_type) else number + 1


def telling(device_type: str, cast_inputs: torch.dtype | None) -> Callable[..., torch.Tensor]:
    """Return a product by 1 whose result and gradients tell the autocast state in forward and in backward.

    Each is the product, of which the digits show the type that it was computed in, plus the number of what the getters
    of the state return.
    """

    class Telling(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(one)
            return torch.mm(x, one).float() + told(device_type)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (one,) = ctx.saved_tensors
            return torch.mm(gradient, one).float() + told(device_type), None

    apply: Callable[..., torch.Tensor] = Telling.apply
    return apply


def operator(device_type: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a product as an operator whose autocast rule casts to `dtype`, with a backward of its own.

    One that is made again takes the place of the one before; it stays registered until the process ends.
    """
    name = f"{OWN}::mm_{device_type}_{str(dtype).removeprefix('torch.')}"
    found = torch.library.custom_op(
        name, lambda a, b: torch.mm(a, b), mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
    )
    found.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))

    def save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return torch.mm(gradient, b.t()), torch.mm(a.t(), gradient)

    found.register_autograd(backward, setup_context=save)
    found.register_autocast(device_type, dtype)
    call: Callable[..., torch.Tensor] = found
    return call
