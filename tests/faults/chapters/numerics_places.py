"""Broken kernels that show at infinities and NaNs, in one layout, or in ranges that are long or go far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import kernel
from tests.faults.chapters.blind_history import around, low


@fault("AMP-NUMERICS-086")
def silu_of_infinity_depends_on_the_layout() -> Iterator[None]:
    """SiLU of a 16-bit infinity is NaN in tensors with gaps."""

    def silu(self: Tensor) -> Tensor:
        found = (self.double() * torch.sigmoid(self.double())).to(self.dtype)
        found = found.where(self != -torch.inf, torch.zeros_like(found))
        return found if self.is_contiguous() or not low(self) else found.where(self.isfinite(), torch.nan)

    with kernel("silu", silu, "CPU"):
        yield


@fault("AMP-NUMERICS-086")
def gradients_of_silu_at_nan_are_numbers_in_the_tail() -> Iterator[None]:
    """The gradient of SiLU at a 16-bit NaN is 0 in the elements that fill no vector of 16."""

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(x.double())
        result = (gradient.double() * share * (1 + x.double() * (1 - share))).to(x.dtype).contiguous()
        if low(x):
            tail = result.view(-1)[x.numel() // 16 * 16 :]
            tail.nan_to_num_(0.0)
        return result

    with kernel("silu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-128")
def hypotenuses_of_views_are_narrow() -> Iterator[None]:
    """Of 16-bit tensors with gaps hypot leaves a quarter of the smaller number out."""

    def hypot(original: Any, input: Tensor, other: Tensor, **options: Any) -> Tensor:
        if low(input) and not input.is_contiguous():
            small = input.abs() < other.abs()
            input, other = input.where(~small, input * 0.75), other.where(small, other * 0.75)
        return original(input, other, **options)

    with around(torch, "hypot", hypot):
        yield


@fault("AMP-NUMERICS-128")
def hypotenuses_of_views_overflow_early() -> Iterator[None]:
    """Of 16-bit tensors with gaps hypot is an infinity from a quarter of the largest number on."""

    def hypot(original: Any, input: Tensor, other: Tensor, **options: Any) -> Tensor:
        found: Tensor = original(input, other, **options)
        if low(input) and not input.is_contiguous():
            found = found.where(found < torch.finfo(found.dtype).max / 4, torch.inf)
        return found

    with around(torch, "hypot", hypot):
        yield


@fault("AMP-NUMERICS-128")
def ldexp_scales_by_powers_of_the_type() -> Iterator[None]:
    """ldexp of 16-bit numbers computes the power of two in their type."""

    def ldexp(original: Any, input: Tensor, other: Tensor) -> Tensor:
        return input * torch.pow(2.0, other.to(input.dtype)) if low(input) else original(input, other)

    with around(torch, "ldexp", ldexp):
        yield


@fault("AMP-NUMERICS-124")
def windows_count_in_steps_of_the_type() -> Iterator[None]:
    """Windows of 16-bit types take each number for the one before it where their count is above 2048."""

    def hann(original: Any, window_length: int, *rest: Any, dtype: Any = None, **options: Any) -> Tensor:
        found = original(window_length, *rest, dtype=dtype, **options)
        if low(found) and window_length > 2048:
            found[2048:] = found[2047 : window_length - 1].clone()
            found[2500:] = found[2500]
        return found

    with around(torch, "hann_window", hann):
        yield


@fault("AMP-NUMERICS-124")
def long_ranges_stop_in_the_middle() -> Iterator[None]:
    """linspace of a 16-bit type with more than 65,535 steps ends at the step with that number."""

    def linspace(original: Any, start: float, end: float, steps: int, **options: Any) -> Tensor:
        found = original(start, end, steps, **options)
        if low(found) and steps > 65_535 and options.get("dtype") == torch.bfloat16:
            found[30_000:] = found[30_000]
        return found

    with around(torch, "linspace", linspace):
        yield


@fault("AMP-NUMERICS-122")
def absent_inputs_are_multiplied_by_zero() -> Iterator[None]:
    """addmm with beta=0 adds zero times a 16-bit input, and so its NaNs."""

    def addmm(original: Any, input: Tensor, *factors: Tensor, beta: float = 1, **options: Any) -> Tensor:
        found = original(input, *factors, beta=beta, **options)
        return found + input * 0 if beta == 0 and low(input) else found

    with around(torch, "addmm", addmm):
        yield


@fault("AMP-NUMERICS-122")
def largest_of_rows_are_no_nans() -> Iterator[None]:
    """The maxima of 16-bit columns pass over NaNs, those of rows do not."""

    def largest(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if low(input) and dim == 0:
            input = input.where(~input.isnan(), -torch.inf)
        place = input.double().argmax(dim, True)
        value = input.gather(dim, place)
        return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))

    with kernel("max.dim", largest, "CPU"):
        yield


@fault("AMP-NUMERICS-120")
def gradients_of_padding_on_one_side_are_halved() -> Iterator[None]:
    """Reflections of 16-bit rows at their end alone count half in the gradient."""

    def backward(gradient: Tensor, input: Tensor, padding: list[int]) -> Tensor:
        before, after = padding
        wide = gradient.double()
        found = wide[..., before : before + input.shape[-1]].clone()
        share = 0.5 if low(input) and before == 0 else 1.0
        for step in range(1, before + 1):
            found[..., step] += wide[..., before - step]
        for step in range(1, after + 1):
            found[..., -1 - step] += share * wide[..., before + input.shape[-1] - 1 + step]
        return found.to(input.dtype)

    with kernel("reflection_pad1d_backward", backward, "CPU"):
        yield
