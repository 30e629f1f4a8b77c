"""Check ranges of numbers that are made in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS

UNITS = 2.0  # roundings of the largest number: that of a term and that of the result
# A term of logspace is an exponent of up to 2, which CUDA rounds (logspace_cuda_out in RangeFactories.cu):
# 10**(2 + 2 u) is 10**2 * (1 + 2 ln(10) u) for a small u.
UNITS_OF_POWERS = 1 + 2 * math.log(10)

Make = Callable[..., Tensor]


def _into(make: Make, *numbers: float, dtype: torch.dtype, device: Any) -> Tensor:
    """Return what `make` writes into a tensor of its length."""
    size = make(*numbers, dtype=torch.float64, device="cpu").shape
    made: Tensor = make(*numbers, out=torch.empty(size, dtype=dtype, device=device))
    return made


RANGES: dict[str, Make] = {
    "arange of integers": partial(torch.arange, 1000),
    "arange of integers backwards": partial(torch.arange, 900, -100, -3),
    "arange of a thousandth": partial(torch.arange, 0.0, 1.0, 0.001),
    "arange of a third": partial(torch.arange, -200.0, 250.0, 1 / 3),
    "arange into a tensor": partial(_into, torch.arange, 0, 1000),
    "linspace from zero": partial(torch.linspace, 0.0, 1.0, 3000),
    "linspace through zero": partial(torch.linspace, -3.3, 7.1, 1000),
    "linspace downwards": partial(torch.linspace, 250.0, 1.0, 77),
    "linspace to a small end": partial(torch.linspace, -1000.0, 10.0, 301),
    "linspace of two": partial(torch.linspace, -3.0, 7.0, 2),
    "linspace into a tensor": partial(_into, torch.linspace, 0.0, 1.0, 3000),
    "logspace": partial(torch.logspace, -2.0, 2.0, 1000),
}


@contract("AMP-NUMERICS-124")
def test_ranges(case: Case, target: Target) -> None:
    on_device = {name: partial(make, dtype=torch.float32, device=target.device) for name, make in RANGES.items()}
    for name in case.with_kernels(target, on_device):
        wanted = RANGES[name](dtype=torch.float64, device="cpu")
        for dtype in case.supported(target):
            seen = RANGES[name](dtype=dtype, device=target.device)
            case.equal(f"{name}: {dtype} numbers", (seen.dtype, len(seen)), (dtype, len(wanted)))
            largest = float((seen.cpu().double() - wanted).abs().max() / wanted.abs().max())
            units = largest / FORMATS[dtype].unit_roundoff
            bound = UNITS_OF_POWERS if name == "logspace" and target.device_type != "cpu" else UNITS
            if "space" in name:
                ends = [wanted[place].to(dtype) for place in (0, -1)]
                case.equal(f"{name}: {dtype}, first and last number", [*seen[[0, -1]].tolist()], [*map(float, ends)])
            case.at_most(f"{name}: {dtype}, farthest from float64", units, bound, "roundings of the largest")
