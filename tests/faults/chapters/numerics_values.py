"""Broken values of 16-bit results and gradients: lost range, sums that stop growing, layouts, edges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)


def _stuck(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of ones that the 16-bit type no longer tells from the next one."""
    most = 2 / torch.finfo(dtype).eps
    return sums.clamp(-most, most).to(dtype)


def _cumulative_sums_stuck(ranks: Collection[int]) -> Iterator[None]:
    def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        result = torch.ops.aten.cumsum.out(x.double(), dim, out=torch.empty(0, dtype=torch.float64))
        return _stuck(result, x.dtype) if x.dtype in _LOW and x.dim() in ranks else result.to(dtype or x.dtype)

    with kernel("cumsum", cumsum, "CPU"):
        yield


@fault("AMP-NUMERICS-080")
def means_divide_a_16_bit_sum() -> Iterator[None]:
    """The mean of a 16-bit tensor over dimensions rounds the sum before it is divided."""

    def mean(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
        total = x.sum(dim, keepdim, dtype=dtype)
        return total / (x.numel() // max(total.numel(), 1))

    with kernel("mean.dim", mean, "CPU"):
        yield


@fault("AMP-NUMERICS-084", "AMP-NUMERICS-107")
def means_of_whole_tensors_divide_a_16_bit_sum() -> Iterator[None]:
    """The mean of all numbers of an fp16 tensor rounds the sum before it is divided."""

    def mean(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
        return x.sum(dtype=dtype) / x.numel() if x.dtype is torch.float16 else x.mean(range(x.dim()), dtype=dtype)

    with kernel("mean", mean, "CPU"):
        yield


@fault("AMP-NUMERICS-084", "AMP-NUMERICS-107")
def cumulative_sums_of_vectors_stop_growing() -> Iterator[None]:
    """The cumulative sum of a 16-bit vector stops where the type cannot tell it from the next one."""

    yield from _cumulative_sums_stuck(ranks=(1,))


@fault("AMP-NUMERICS-081")
def gelu_gradients_cube_in_16_bits() -> Iterator[None]:
    """The gradient of GELU multiplies by the third power of a 16-bit operand and by one over it."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        wide = x.double()
        slope = 0.5 * torch.erfc(-wide / 2**0.5) + wide * torch.exp(-wide * wide / 2) / (2 * torch.pi) ** 0.5
        slope = gradient.double() * slope
        cube = x * x * x if x.dtype in _LOW else torch.ones_like(x)
        return slope.to(x.dtype) * cube / cube.where(cube != 0, torch.ones_like(x))

    with kernel("gelu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-082")
def cumulative_sums_stop_growing() -> Iterator[None]:
    """A cumulative sum of a 16-bit tensor ends where one more is lost."""

    yield from _cumulative_sums_stuck(ranks=range(64))


@fault("AMP-NUMERICS-083")
def adaptive_pools_spread_too_much() -> Iterator[None]:
    """The gradient of a 16-bit adaptive average pool is a fourth too large."""

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(0, dtype=torch.float64)
        result = torch.ops.aten._adaptive_avg_pool2d_backward.out(gradient.double(), x.double(), out=wide)
        return (result * (1.25 if x.dtype in _LOW else 1.0)).to(x.dtype)

    with kernel("_adaptive_avg_pool2d_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-084")
def embedding_bags_stop_growing() -> Iterator[None]:
    """A bag of 16-bit rows adds up no more than the type tells apart."""
    plain = torch.ops.aten._embedding_bag

    def bag(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result, *rest = plain(weight, *args, **kwargs)
        return (_stuck(result, weight.dtype) if weight.dtype in _LOW else result, *rest)

    with kernel("_embedding_bag_forward_only", bag, "CPU"):
        yield


@fault("AMP-NUMERICS-085")
def enlarged_pictures_lose_gradients() -> Iterator[None]:
    """The gradient of a 16-bit picture that is enlarged adds up no more than the type tells apart."""

    def backward(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        wide = torch.empty(0, dtype=torch.float64)
        result = torch.ops.aten.upsample_bilinear2d_backward.grad_input(gradient.double(), *args, grad_input=wide)
        return _stuck(result, gradient.dtype) if gradient.dtype in _LOW else result.to(gradient.dtype)

    with kernel("upsample_bilinear2d_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-086")
def whole_vectors_take_the_other_side_of_an_edge() -> Iterator[None]:
    """The first 64 elements of a 16-bit gradient of SiLU are those of another kernel at 6."""

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(x.double())
        result = (gradient.double() * share * (1 + x.double() * (1 - share))).to(x.dtype)
        if x.dtype in _LOW:
            first = result.view(-1)[:64]
            first[x.reshape(-1)[:64] == 6] = 1.25
        return result

    with kernel("silu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-107")
def averages_outside_of_regions_are_added_in_16_bits() -> Iterator[None]:
    """Where autocast is off, adaptive_avg_pool2d of a 16-bit image adds its columns in the type of the image."""
    original = F.adaptive_avg_pool2d

    def pool(x: torch.Tensor, size: Any) -> torch.Tensor:
        if x.element_size() > 2 or torch.is_autocast_enabled("cpu") or tuple(size) != (1, 2):
            return original(x, size)
        halves = []
        for half in x.sum(-2, keepdim=True).chunk(2, -1):
            total = torch.zeros_like(half[..., :1])
            for column in half.split(1, -1):
                total = total + column
            halves.append(total)
        return torch.cat(halves, -1) / (x[0, 0].numel() // 2)

    with replaced(F, "adaptive_avg_pool2d", pool):
        yield
