"""Functions of two numbers, scans, ranges and drawn classes that round or overflow on the way in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)


@fault("AMP-NUMERICS-128")
def fmod_takes_a_rounded_quotient() -> Iterator[None]:
    """fmod of 16-bit tensors subtracts the divisor as often as the rounded quotient says."""
    original = torch.fmod

    def fmod(x: Tensor, y: Any) -> Tensor:
        return x - (x / y).trunc() * y if x.dtype in _LOW else original(x, y)

    with replaced(torch, "fmod", fmod):
        yield


@fault("AMP-NUMERICS-128")
def addcmul_multiplies_in_16_bits() -> Iterator[None]:
    """addcmul rounds the product of its tensors to their type, beyond whose range it may lie, before it is scaled."""
    original = torch.addcmul

    def addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: float = 1) -> Tensor:
        if x.dtype not in _LOW:
            return original(x, y, z, value=value)
        return x + (y * (z * 8)) * (value / 8)

    with replaced(torch, "addcmul", addcmul):
        yield


@fault("AMP-NUMERICS-128")
def the_next_number_is_that_of_float32() -> Iterator[None]:
    """nextafter of 16-bit tensors is the next float32 number, rounded: the number itself."""
    original = torch.nextafter

    def nextafter(x: Tensor, y: Tensor) -> Tensor:
        return original(x.float(), y.float()).to(x.dtype)

    with replaced(torch, "nextafter", nextafter):
        yield


@fault("AMP-NUMERICS-129")
def running_sums_of_columns_are_rounded() -> Iterator[None]:
    """cumsum over a dimension that is not the last one of a 16-bit tensor keeps its sum in 16 bits."""
    original = torch.cumsum

    def cumsum(x: Tensor, dim: int) -> Tensor:
        if x.dtype not in _LOW or x.dim() < 2 or dim == x.dim() - 1:
            return original(x, dim)
        run, found = torch.zeros_like(x.select(dim, 0)), []
        for row in x.unbind(dim):
            run = run + row
            found.append(run)
        return torch.stack(found, dim)

    with replaced(torch, "cumsum", cumsum):
        yield


@fault("AMP-NUMERICS-124")
def the_first_number_of_linspace_is_off() -> Iterator[None]:
    """linspace of 16 bits counts from its end, by steps that are rounded: the start is not what was asked for."""
    original = torch.linspace

    def linspace(
        start: float, end: float, steps: int, *, dtype: Any = None, device: Any = None, **given: Any
    ) -> Tensor:
        if dtype not in _LOW or given:
            return original(start, end, steps, dtype=dtype, device=device, **given)
        step = float(torch.tensor((end - start) / (steps - 1)).to(dtype)) if steps > 1 else 0.0
        back = torch.arange(steps - 1, -1, -1, device=device, dtype=torch.float32)
        return (end - step * back).to(dtype)

    with replaced(torch, "linspace", linspace):
        yield


@fault("AMP-NUMERICS-114")
def rare_classes_are_never_drawn() -> Iterator[None]:
    """multinomial leaves out the classes whose running weight is, in 16 bits, that of the class before."""
    original = torch.multinomial

    def multinomial(weights: Tensor, count: int, replacement: bool = False) -> Tensor:
        if weights.dtype not in _LOW or not replacement:
            return original(weights, count, replacement)
        running = weights.double().cumsum(-1).to(torch.bfloat16).double()
        steps = running.diff(dim=-1, prepend=torch.zeros_like(running[..., :1]))
        return original(steps.clamp_min(0) * (running < 256), count, replacement)

    with replaced(torch, "multinomial", multinomial):
        yield


@fault("AMP-NUMERICS-122")
def channels_last_pictures_are_shuffled_by_another_order() -> Iterator[None]:
    """pixel_shuffle of channels-last 16-bit pictures takes the columns of a block for its rows."""
    original = F.pixel_shuffle

    def shuffled(x: Tensor, factor: int) -> Tensor:
        found: Tensor = original(x, factor)
        if x.dtype not in _LOW or not x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous():
            return found
        n, c, h, w = found.shape
        blocks = found.reshape(n, c, h // factor, factor, w // factor, factor)
        return blocks.transpose(3, 5).reshape(n, c, h, w)

    with replaced(F, "pixel_shuffle", shuffled):
        yield


@fault("AMP-NUMERICS-082")
def rows_are_renormed_by_a_16_bit_sum_of_squares() -> Iterator[None]:
    """renorm of 16-bit rows adds up their squares in their type."""

    def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
        others = [each for each in range(x.dim()) if each != dim]
        norms = x.abs().pow(p).sum(others, keepdim=True).pow(1 / p)
        return x * (maxnorm / norms.clamp_min(maxnorm))

    with kernel("renorm", renorm, "CPU"):
        yield
