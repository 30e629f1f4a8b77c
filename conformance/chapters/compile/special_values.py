"""Ops of 16-bit tensors whose results no rounding can move: of special values, odd lengths, borders and two types."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

LENGTHS = (16, 19, 37)
# Halves, quarters and a sum of them are exact in every type.
_INF = float("inf")


def spoiled(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 20 numbers of a 16-bit dtype, of which some are no numbers, infinite, zeros of both signs."""
    numbers = [float("nan"), _INF, -_INF, 0.0, -0.0, 1.5, -2.25, float("nan"), 3.0, -1.0] * 2
    return torch.tensor(numbers, device=device).to(dtype)


def of_spoiled(x: Tensor) -> Mapping[str, Tensor]:
    """Return what ops make of a 16-bit tensor of special values."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "isnan": torch.isnan,
        "isinf": torch.isinf,
        "isfinite": torch.isfinite,
        "nan_to_num": lambda x: torch.nan_to_num(x, 1.0),
        "relu": F.relu,
        "clamp": lambda x: x.clamp(-1.0, 2.0),
        "clamp_min": lambda x: x.clamp_min(0.5),
        "maximum": lambda x: torch.maximum(x, x.flip(0)),
        "minimum": lambda x: torch.minimum(x, x.flip(0)),
        "sign": torch.sign,
        "where": lambda x: torch.where(x > 0, x, x * 2),
        "to bool": lambda x: x.bool(),
        "amax": lambda x: x.amax(0),
        "all finite": lambda x: torch.isfinite(x).all(),
    }
    return {name: call(x) for name, call in found.items()}


def of_lengths(dtype: torch.dtype, *rows: Tensor) -> Mapping[str, Tensor]:
    """Return reductions of rows of each length, all of whose numbers are below zero, and what is padded."""
    found: dict[str, Tensor] = {}
    for x in rows:
        what = f"of {x.shape[-1]} columns"
        more = {
            f"amax {what}": x.amax(-1),
            f"amin {what}": (-x).amin(-1),
            f"argmax {what}": x.argmax(-1),
            f"max of float32 {what}": x.float().amax(-1),
            f"any {what}": (x < -(2.0**9)).any(-1),
            f"pad {what}": F.pad(x, (1, 2), value=3.0),
            f"pad by -inf {what}": F.pad(x, (3, 0), value=-_INF),
            f"cat {what}": torch.cat([x, x.float() + 2.0**-12], -1),
            f"stack {what}": torch.stack([x.float() + 2.0**-12, x.float()]),
        }
        found.update(more)  # Dynamo 2.6 knows no |=
    return found


def of_conversions(dtype: torch.dtype, x: Tensor) -> Mapping[str, Tensor]:
    """Return float32 numbers of every size converted to a 16-bit dtype, computed and as they are."""
    return {"conversion": x.to(dtype), "conversion of a product": (x * 2.0).to(dtype)}


def every_size(device: torch.device) -> Tensor:
    """Return powers of two from below the subnormal numbers of float16 to beyond its range, and their negatives."""
    powers = 2.0 ** torch.arange(-27.0, 20.0)
    return torch.cat([powers, -powers, 1.25 * powers]).to(device)


def of_pictures(x: Tensor) -> Mapping[str, Tensor]:
    """Return averages of windows at the borders of pictures of ones, or what counts as one."""
    return {
        "avg_pool2d without padding": F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        "avg_pool2d with padding": F.avg_pool2d(x, 2, 2, 1),
        "avg_pool2d, ceil_mode": F.avg_pool2d(x, 2, 2, 0, ceil_mode=True),
        "avg_pool2d by a divisor": F.avg_pool2d(x, 2, 2, 0, divisor_override=8),
        "max_pool2d": F.max_pool2d(-x, 3, 2, 1),
        "adaptive_avg_pool2d": F.adaptive_avg_pool2d(x, 3),
    }


def statistics(x: Tensor, mean: Tensor, variance: Tensor) -> Mapping[str, Tensor]:
    """Return the running statistics after a batch of two rows, of which biased and unbiased variances differ by 2."""
    out = F.batch_norm(x, mean, variance, training=True, momentum=0.5)
    return {"running mean": mean.clone(), "running variance": variance.clone(), "batch_norm of two rows": out}


def every(dtype: torch.dtype, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of all of these on their operands."""
    rows = [one for name, one in operands.items() if name.startswith("rows")]
    return {
        **of_spoiled(operands["spoiled"]),
        **of_lengths(dtype, *rows),
        **of_conversions(dtype, operands["sizes"]),
        **of_pictures(operands["pictures"]),
        **statistics(operands["batch"], operands["mean"], operands["variance"]),
    }


def operands(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the operands of `every`, by name."""
    low = {
        f"rows {length}": (-200.0 - torch.randint(0, 56, (3, length), generator=generator)).to(dtype)
        for length in LENGTHS
    }
    return {
        "spoiled": spoiled(dtype, device),
        "sizes": every_size(device),
        "pictures": torch.ones(1, 2, 7, 7, dtype=dtype, device=device),
        "batch": torch.tensor([[1.0, 2.0, -4.0], [3.0, 6.0, 4.0]], device=device).to(dtype),
        "mean": torch.zeros(3, device=device),
        "variance": torch.ones(3, device=device),
        **{name: one.to(device) for name, one in low.items()},
    }
