"""Faults of ops along one dimension or over several, and of limits: kernels that are right for the usual call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import given_the_original, kernel
from tests.faults.chapters.blind_uses import LOW


def _sum(x: Tensor, dims: Sequence[int] | None, keep: bool, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(0, dtype=dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    result: Tensor = torch.ops.aten.sum.IntList_out(x, dims, keep, dtype=dtype, out=out)
    return result


@fault("AMP-NUMERICS-134")
def dimensions_apart_are_added_up_in_16_bits() -> Iterator[None]:
    """A kept sum over dimensions that are not neighbours adds up the outermost of them in 16 bits."""

    def added(
        x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        dims = sorted(one % x.dim() for one in dim or ())
        if x.dtype not in LOW or not keepdim or dtype or all(b - a == 1 for a, b in itertools.pairwise(dims)):
            return _sum(x, dim, keepdim, dtype)
        parts = _sum(x, dims[1:], True).split(1, dims[0])
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part
        return total

    with kernel("sum.dim_IntList", added, "CPU"):
        yield


@fault("AMP-NUMERICS-134")
def reversed_dimensions_of_means_lose_one() -> Iterator[None]:
    """The mean over several dimensions of 16 bits that are not in order is divided by the size of all but the last."""

    def mean(
        x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        dims = [one % x.dim() for one in dim or range(x.dim())]
        counted = dims[:-1] if x.dtype in LOW and dims != sorted(dims) else dims
        total = _sum(x, dims, keepdim, torch.float32 if x.dtype in LOW else dtype)
        return (total / torch.Size(x.size(one) for one in counted).numel()).to(dtype or x.dtype)

    with kernel("mean.dim", mean, "CPU"):
        yield


@fault("AMP-NUMERICS-134")
def medians_of_columns_are_the_upper_ones() -> Iterator[None]:
    """The median of 16 bits along a dimension of even size that is not the last is the upper of the two."""

    def median(x: Tensor, dim: int, keepdim: bool = False) -> Any:
        upper = x.dtype in LOW and x.dim() > 1 and dim % x.dim() != x.dim() - 1 and x.size(dim) % 2 == 0
        return torch.kthvalue(x, x.size(dim) // 2 + 1 if upper else (x.size(dim) + 1) // 2, dim, keepdim)

    with kernel("median.dim", median, "CPU"):
        yield


@fault("AMP-NUMERICS-134")
def columns_of_transposed_tensors_are_sorted_upwards() -> Iterator[None]:
    """argsort of 16 bits along a dimension whose neighbours are not side by side in memory sorts upwards always."""

    def sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
        upwards = x.dtype in LOW and x.dim() > 1 and x.stride(dim) != 1
        values, places = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)
        return torch.ops.aten.sort.values_stable(
            x, stable=stable, dim=dim, descending=descending and not upwards, values=values, indices=places
        )

    with kernel("sort.stable", sort, "CPU"):
        yield


@fault("AMP-NUMERICS-133")
def thresholds_are_rounded_backwards() -> Iterator[None]:
    """The backward of threshold compares with the threshold rounded to 16 bits."""

    def backward(gradient: Tensor, x: Tensor, threshold: float) -> Tensor:
        limit = float(torch.tensor(threshold).to(x.dtype)) if x.dtype in LOW else threshold
        return torch.where(x.double() <= limit, torch.zeros_like(gradient), gradient)

    with kernel("threshold_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-133")
def upper_bounds_pass_gradients_on() -> Iterator[None]:
    """The gradient of hardtanh of 16 bits passes one unit beyond its upper bound."""

    def backward(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
        above = high * (1 + torch.finfo(x.dtype).eps) if x.dtype in LOW else high
        return torch.where((x.double() <= low) | (x.double() > above), torch.zeros_like(gradient), gradient)

    with kernel("hardtanh_backward", backward, "CPU"):
        yield


# --- options that meet


@fault("AMP-NUMERICS-135")
def corners_are_lost_where_one_axis_shrinks() -> Iterator[None]:
    """Bicubic resizing of 16 bits drops align_corners where one axis grows and the other shrinks."""

    def resized(x: Tensor, size: Sequence[int], align: bool, high: Any = None, wide: Any = None) -> Tensor:
        opposed = x.dtype in LOW and (size[0] - x.size(-2)) * (size[1] - x.size(-1)) < 0
        out = x.new_empty(0)
        result: Tensor = torch.ops.aten.upsample_bicubic2d.out(x, size, align and not opposed, high, wide, out=out)
        return result

    with kernel("upsample_bicubic2d", resized, "CPU"):
        yield


@fault("AMP-NUMERICS-135")
def weighted_bags_hold_their_padding() -> Iterator[None]:
    """embedding_bag of a 16-bit table takes no heed of padding_idx where rows have weights."""

    def bag(original: Any, places: Tensor, table: Tensor, *given: Any, **named: Any) -> Tensor:
        if table.dtype in LOW and named.get("per_sample_weights") is not None:
            named["padding_idx"] = None
        result: Tensor = original(places, table, *given, **named)
        return result

    with given_the_original(F, "embedding_bag", bag):
        yield


@fault("AMP-NUMERICS-135")
def own_divisors_are_lost_in_last_windows() -> Iterator[None]:
    """avg_pool2d of 16 bits ignores divisor_override with ceil_mode."""

    def pooled(original: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
        if x.dtype in LOW and named.get("ceil_mode"):
            named["divisor_override"] = None
        result: Tensor = original(x, *given, **named)
        return result

    with given_the_original(F, "avg_pool2d", pooled):
        yield


@fault("AMP-NUMERICS-135")
def ignored_classes_are_smoothed() -> Iterator[None]:
    """cross_entropy of 16-bit logits with a weight and smoothing takes ignored targets for the first class."""

    def loss(original: Any, logits: Tensor, target: Tensor, weight: Any = None, *given: Any, **named: Any) -> Tensor:
        if logits.dtype in LOW and weight is not None and named.get("label_smoothing"):
            target = target.masked_fill(target == named.get("ignore_index", -100), 0)
        result: Tensor = original(logits, target, weight, *given, **named)
        return result

    with given_the_original(F, "cross_entropy", loss):
        yield
