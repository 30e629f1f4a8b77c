"""Faults of autocast: its op lists, its regions, its cache, and the values and gradients of what runs in a region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .planting import autocast_kernel, autocast_key, dropped, replaced
from .registry import fault


@fault("AMP-CAST-038", kind="any", first="mm")
def product_is_off_the_16_bit_list(device_type: str) -> Iterator[None]:
    """mm has no autocast kernel, so that it computes in fp32."""
    with dropped("mm", autocast_key(device_type)):
        yield


@fault("AMP-CAST-039", kind="any", first="mse_loss")
def loss_is_off_the_fp32_list(device_type: str) -> Iterator[None]:
    """mse_loss has no autocast kernel, so that it computes in the type of its inputs."""
    with dropped("mse_loss", autocast_key(device_type)):
        yield


@fault("AMP-CAST-038", kind="any", first="bmm")
def product_is_cast_to_the_other_16_bit_type(device_type: str) -> Iterator[None]:
    """bmm casts to bf16 where the region asks for fp16, and the other way round."""

    def changed(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.bmm(left.to(_other(dtype)), right.to(_other(dtype)))

    with autocast_kernel("bmm", changed, device_type):
        yield


@fault("AMP-REGION-030")
def region_stays_enabled(device_type: str) -> Iterator[None]:
    """Autocast is enabled after the end of every region."""
    leave = torch.autocast.__exit__

    def changed(self: Any, *exception: Any) -> Any:
        result = leave(self, *exception)
        torch.set_autocast_enabled(self.device, True)
        return result

    with replaced(torch.autocast, "__exit__", changed):
        yield


@fault("AMP-REGION-001")
def region_has_the_other_16_bit_type(device_type: str) -> Iterator[None]:
    """A region that is asked for fp16 computes in bf16."""
    with _regions(torch.float16, torch.bfloat16):
        yield


@fault("AMP-BF16-003")
def bf16_region_computes_in_fp16(device_type: str) -> Iterator[None]:
    """A region that is asked for bf16 computes in fp16, whose range is smaller."""
    with _regions(torch.bfloat16, torch.float16):
        yield


@fault("AMP-CACHE-003")
def cache_outlives_its_region(device_type: str) -> Iterator[None]:
    """The end of the outermost region keeps the casts of weights, so that the next one computes with stale ones."""
    with replaced(torch, "clear_autocast_cache", lambda: None):
        yield


@fault("AMP-LOSS-003", first="mse_loss")
def loss_is_computed_in_16_bits(device_type: str) -> Iterator[None]:
    """mse_loss computes in 16 bits and casts its result to fp32."""

    def changed(dtype: torch.dtype, x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        terms = (x.to(dtype) - y.to(dtype)).square()
        return (terms, terms.mean(), terms.sum())[reduction].float()

    with autocast_kernel("mse_loss", changed, device_type):
        yield


@fault("AMP-NUMERICS-016", first="mm_one")
def sums_are_rounded_to_16_bits(device_type: str) -> Iterator[None]:
    """mm rounds every partial sum of its products to 16 bits."""

    def changed(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = left.to(dtype), right.to(dtype)
        total = left[:, :1] * right[:1]
        for column, row in zip(left.split(1, dim=1)[1:], right.split(1)[1:], strict=True):
            total = total + column * row
        return total

    with autocast_kernel("mm", changed, device_type):
        yield


@fault("AMP-BACKWARD-004")
def weight_gets_no_gradient(device_type: str) -> Iterator[None]:
    """linear casts its weight without recording the cast, so that the weight gets no gradient."""

    def changed(
        dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(
            x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.to(dtype)
        )

    with autocast_kernel("linear", changed, device_type):
        yield


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float16 else torch.float16


def _regions(asked: torch.dtype, entered: torch.dtype) -> Any:
    """Let torch.autocast enter a region of `entered` where it is asked for one of `asked`."""
    begin = torch.autocast.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.fast_dtype is asked:
            self.fast_dtype = entered

    return replaced(torch.autocast, "__init__", changed)
