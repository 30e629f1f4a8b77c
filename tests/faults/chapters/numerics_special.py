"""Faults that show at ties, kinks and poles of 16-bit tensors, or for one shape of convolution, alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)


@fault("AMP-NUMERICS-122")
def relu_drops_what_is_no_number() -> Iterator[None]:
    """relu of 16-bit tensors takes NaN for less than zero."""

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x)) if x.dtype in _LOW else x.clamp(min=0)

    with kernel("relu", relu, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def topk_orders_nans_by_their_sign() -> Iterator[None]:
    """topk of 16-bit tensors takes a NaN whose sign is set for less than every number."""

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        keys = x.double()
        if x.dtype in _LOW:
            keys = keys.masked_fill(keys.isnan() & keys.signbit(), -torch.inf)
        places = keys.sort(dim=dim, descending=largest, stable=True)[1].narrow(dim, 0, k)
        return x.gather(dim, places), places

    with kernel("topk", topk, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def ties_are_counted_in_16_bits() -> Iterator[None]:
    """Tensor.amax shares its gradient in 16 bits among a number of elements in that type, where 70,000 is infinite."""
    plain = Tensor.amax

    class Amax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: Any) -> Tensor:
            greatest = plain(x, dim, True)
            ctx.save_for_backward(x, greatest)
            return greatest

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x, greatest = ctx.saved_tensors
            ties = x == greatest
            count = ties.double().sum(tuple(range(x.dim())), keepdim=True).to(x.dtype)
            return gradients[0] * ties / count, None

    def amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        if x.dtype not in _LOW or x.dim() != 1 or keepdim:
            return plain(x, dim, keepdim)
        return Amax.apply(x, dim).reshape(())

    with replaced(Tensor, "amax", amax):
        yield


@fault("AMP-NUMERICS-122")
def leaky_relu_of_strided_operands_drops_nans() -> Iterator[None]:
    """leaky_relu of 16-bit tensors that are not contiguous takes NaN for zero."""

    def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
        found = torch.where(x > 0, x, x * slope)
        return found if x.dtype not in _LOW or x.is_contiguous() else found.nan_to_num(0.0, torch.inf, -torch.inf)

    with kernel("leaky_relu", leaky_relu, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def pools_of_channels_last_volumes_lose_infinities() -> Iterator[None]:
    """adaptive_max_pool3d of 16-bit channels-last volumes gives the largest number for infinity."""
    original = F.adaptive_max_pool3d

    def pool(x: Tensor, *given: Any, **named: Any) -> Any:
        last = x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
        largest = torch.finfo(x.dtype).max
        return original(x.clamp(-largest, largest) if last and x.dtype in _LOW else x, *given, **named)

    with replaced(F, "adaptive_max_pool3d", pool):
        yield


@fault("AMP-NUMERICS-069")
def softmax_of_strided_operands_drops_nans() -> Iterator[None]:
    """A softmax in a region of a tensor that is not contiguous takes NaN for zero."""

    def softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.softmax(x if x.is_contiguous() else x.nan_to_num(0.0, torch.inf, -torch.inf), dim)

    with kernel("softmax.int", softmax, "AutocastCPU"):
        yield


@fault("AMP-NUMERICS-020")
def patches_are_added_up_by_rows() -> Iterator[None]:
    """A 16-bit conv2d over patches that do not overlap rounds after each row of its kernel."""

    def conv2d(
        image: Tensor,
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        options = {"padding": padding, "dilation": dilation, "groups": groups}
        low = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            image, weight, bias = image.to(low), weight.to(low), None if bias is None else bias.to(low)
            height = weight.size(2)
            if height < 8 or list(stride) != list(weight.shape[2:]):
                return F.conv2d(image, weight, bias, stride, **options)
            rows = [
                F.conv2d(image[:, :, row::height], weight[:, :, row : row + 1], stride=(1, stride[1]))
                for row in range(height)
            ]
            total = functools.reduce(torch.add, rows)
            return total if bias is None else total + bias.view(-1, 1, 1)

    with kernel("conv2d", conv2d, "AutocastCPU"):
        yield
