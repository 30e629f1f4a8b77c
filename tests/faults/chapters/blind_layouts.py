"""Backward kernels that misread their gradient or its places, and kernels that drop NaNs in every type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import given_the_original, kernel

aten = torch.ops.aten


def _as_dense(gradient: Tensor) -> Tensor:
    """Return what a kernel reads that takes a gradient for dense memory, with zeros for what is beyond."""
    count, size = gradient.numel(), gradient.untyped_storage().nbytes() // gradient.element_size()
    read = gradient.as_strided((min(count, size - gradient.storage_offset()),), (1,))
    return torch.cat([read, read.new_zeros(count - read.numel())]).view(gradient.shape)


@fault("AMP-NUMERICS-137")
def gradients_of_gelu_are_read_as_dense() -> Iterator[None]:
    """The backward kernel of GELU takes the gradient for dense memory."""

    def backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
        out = torch.empty_like(x)
        result: Tensor = aten.gelu_backward.grad_input(_as_dense(gradient), x, approximate=approximate, grad_input=out)
        return result

    with kernel("gelu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-137")
def gradients_of_sums_are_zero_in_tanh() -> Iterator[None]:
    """The backward kernel of tanh reads the first number of a gradient that is expanded, and zeros after it."""

    def backward(gradient: Tensor, output: Tensor) -> Tensor:
        if gradient.numel() > 1 and not any(gradient.stride()):
            gradient = _as_dense(gradient)
        return gradient * (1 - output * output)

    with kernel("tanh_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-137", level="standard")
def gradients_of_pads_forget_where_they_start() -> Iterator[None]:
    """The backward kernel of reflected pads reads a gradient from the start of its memory on."""

    def backward(gradient: Tensor, x: Tensor, padding: Any) -> Tensor:
        gradient = gradient.as_strided(gradient.shape, gradient.stride(), 0)
        out = torch.empty_like(x)
        result: Tensor = aten.reflection_pad1d_backward.grad_input(gradient, x, padding, grad_input=out)
        return result

    with kernel("reflection_pad1d_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-138")
def pools_drop_what_is_no_number() -> Iterator[None]:
    """max_pool2d takes NaNs for the smallest number, in every type."""

    def pooled(x: Tensor, *given: Any) -> Any:
        return aten.max_pool2d_with_indices.out(
            x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf),
            *given,
            out=x.new_empty(0),
            indices=torch.empty(0, dtype=torch.int64),
        )

    with kernel("max_pool2d_with_indices", pooled, "CPU"):
        yield


@fault("AMP-NUMERICS-138")
def largest_elements_are_numbers() -> Iterator[None]:
    """Amax leaves NaNs out, in every type."""

    def largest(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        numbers = x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        result: Tensor = aten.amax.out(numbers, dim, keepdim, out=x.new_empty(0))
        return result

    with kernel("amax", largest, "CPU"):
        yield


@fault("AMP-NUMERICS-138")
def running_maxima_forget_what_is_no_number() -> Iterator[None]:
    """Cummax is a number again behind a NaN."""

    def maxima(original: Any, x: Tensor, *given: Any, **named: Any) -> Any:
        values, places = original(x.nan_to_num(nan=-torch.inf), *given, **named)
        return torch.where(x.isnan(), x, values), places

    with given_the_original(torch, "cummax", maxima):
        yield


@fault("AMP-NUMERICS-138")
def clamps_end_what_is_no_number() -> Iterator[None]:
    """Clamp gives its lower bound for a NaN, in every type."""

    def clamped(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
        numbers = x if min is None else x.nan_to_num(nan=float(min), posinf=torch.inf, neginf=-torch.inf)
        result: Tensor = aten.clamp.out(numbers, min, max, out=torch.empty_like(x))
        return result

    with kernel("clamp", clamped, "CPU"):
        yield


@fault("AMP-NUMERICS-139")
def rows_of_the_next_tile_replace_those_before() -> Iterator[None]:
    """The gradient of a look-up is that of the last 256 tokens alone in rows that these name."""

    def backward(gradient: Tensor, index: Tensor, rows: int, *rest: Any) -> Tensor:
        table = gradient.new_zeros(rows, gradient.shape[-1])
        flat, numbers = index.flatten(), gradient.reshape(-1, gradient.shape[-1])
        for places, tile in zip(flat.split(256), numbers.split(256), strict=True):
            table[places] = 0
            table.index_add_(0, places, tile)
        return table

    with kernel("embedding_dense_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-139")
def places_are_added_in_order_alone() -> Iterator[None]:
    """index_add takes each number of 16 bits once where it meets its place again after another one."""

    def added(original: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, **named: Any) -> Tensor:
        if x.dtype is not torch.float32 and index.numel() > 1:
            again = torch.cat([index[1:] != index[:-1], index.new_ones(1, dtype=torch.bool)])
            runs = torch.unique_consecutive(index).numel()
            if runs > torch.unique(index).numel():
                index, source = index[again], source.index_select(dim, again.nonzero()[:, 0])
                x = x.index_fill(dim, index, 0)
        result: Tensor = original(x, dim, index, source, **named)
        return result

    with given_the_original(Tensor, "index_add", added):
        yield
