"""Check ranges of numbers that are made in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
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


# Ends whose difference is beyond the type; each number between them is not.
FAR = {torch.float16: 60_000.0, torch.bfloat16: 3e38}
MANY = 70_000  # more than fp16 counts


@contract("AMP-NUMERICS-124")
def test_long_ranges(case: Case, target: Target) -> None:
    for dtype in case.supported(target):
        for name, numbers in {"far ends": (-FAR[dtype], FAR[dtype], 7), "many steps": (0.0, 1.0, MANY)}.items():
            wanted = torch.linspace(*numbers, dtype=torch.float64)
            seen = torch.linspace(*numbers, dtype=dtype, device=target.device).cpu().double()
            units = float((seen - wanted).abs().max() / wanted.abs().max()) / FORMATS[dtype].unit_roundoff
            case.at_most(
                f"linspace of {name}: {dtype}, farthest from float64", units, UNITS, "roundings of the largest"
            )


WINDOWS: dict[str, Make] = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "bartlett": torch.bartlett_window,
}
# A window is composed of up to four ops, of which each rounds a phase of up to 2 pi or a result.
UNITS_OF_WINDOWS = 8.0


@contract("AMP-NUMERICS-124")
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(case: Case, target: Target, window: str) -> None:
    make = WINDOWS[window]
    for count in (400, 3000, MANY):
        wanted = make(count, dtype=torch.float64)
        for dtype in case.supported(target):
            seen = make(count, dtype=dtype, device=target.device)
            case.equal(f"{window} of {count}: {dtype} numbers", (seen.dtype, len(seen)), (dtype, count))
            units = float((seen.cpu().double() - wanted).abs().max()) / FORMATS[dtype].unit_roundoff
            case.at_most(
                f"{window} of {count}: {dtype}, farthest from float64", units, UNITS_OF_WINDOWS, "roundings of 1"
            )
