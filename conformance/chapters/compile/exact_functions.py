"""Functions of one, two and three 16-bit numbers of any bits whose result every way to compute them holds exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers.formats import OTHER

One: TypeAlias = Callable[[Tensor], Tensor]
Two: TypeAlias = Callable[[Tensor, Tensor], Tensor]

OF_ONE: Mapping[str, One] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("trunc", "floor", "ceil", "round", "frac", "sign", "sgn", "neg", "abs", "signbit"),
            *("isinf", "isnan", "isfinite", "isposinf", "isneginf", "logical_not", "nan_to_num", "relu"),
        )
    },
    "frexp, mantissa": lambda x: torch.frexp(x).mantissa,
    "frexp, exponent": lambda x: torch.frexp(x.nan_to_num(0.0, 0.0, 0.0)).exponent,
    "to float32": lambda x: x.float(),
    "to the other type": lambda x: x.to(OTHER[x.dtype]),
    "bits": lambda x: x.view(torch.int16),
    "clamped": lambda x: x.clamp(-1.5, 2.0),
    "relu6": F.relu6,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "half of a larger": lambda x: torch.where(x.abs() > 1, x * 0.5, x),
}
"""Functions of one number."""

OF_TWO: Mapping[str, Two] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("nextafter", "copysign", "maximum", "minimum", "fmax", "fmin", "heaviside"),
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
        )
    },
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamped from below": lambda x, y: x.clamp(min=y),
    "clamped from above": lambda x, y: x.clamp(max=y),
}
"""Functions of two numbers."""


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """Return the remainder, 0 without a sign: which one it has is written nowhere, and eager and inductor differ."""
    rest = torch.remainder(x, y)
    return torch.where(rest == 0, torch.zeros_like(rest), rest)


OF_INTEGERS: Mapping[str, Two] = {
    "remainder": _remainder,
    "fmod": torch.fmod,
    "ldexp": lambda x, y: torch.ldexp(x, (y.abs() % 4).to(torch.int32)),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
}
"""Functions of two small integers or halves that are exact for these."""

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, float("inf"), -float("inf"), float("nan"))


def numbers(dtype: torch.dtype, device: torch.device, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pairs of numbers of random bits, of neighbours, of opposite ones, and each two of the special ones."""
    bits = torch.randint(-(2**15), 2**15, (2, count), generator=generator).to(torch.int16)
    # Of a signaling NaN, IEEE 754 has it that fmax and fmin may give NaN.
    x, y = torch.where(bits.view(dtype).isnan(), torch.tensor(float("nan"), dtype=dtype), bits.view(dtype))
    near = x[: count // 4].view(torch.int16) ^ 1
    special = torch.tensor(SPECIAL).to(dtype)
    left, right = (each.flatten() for each in torch.meshgrid(special, special, indexing="ij"))
    first = torch.cat([x, x[: count // 4], x[: count // 4], left])
    beside = torch.where(x[: count // 4].isfinite(), near.view(dtype), y[: count // 4])
    second = torch.cat([y, beside, -x[: count // 4], right])
    return first.to(device), second.to(device)


def integers(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pairs of halves below 8, of which the second is not zero: their products have 8 bits."""
    x = torch.randint(-15, 16, (64,), generator=generator)
    y = torch.randint(1, 16, (64,), generator=generator) * (1 - 2 * torch.randint(0, 2, (64,), generator=generator))
    return (x / 2).to(device, dtype), (y / 2).to(device, dtype)


def calls() -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    """Return the functions by name, of bits `x` and `y`, and of integers and halves `a` and `b`."""
    return {
        **{name: lambda x, y, a, b, call=call: call(x) for name, call in OF_ONE.items()},  # type: ignore[misc]
        **{name: lambda x, y, a, b, call=call: call(x, y) for name, call in OF_TWO.items()},  # type: ignore[misc]
        **{name: lambda x, y, a, b, call=call: call(a, b) for name, call in OF_INTEGERS.items()},  # type: ignore[misc]
    }
