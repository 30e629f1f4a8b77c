"""Check that TF32 and reduced precision flags of CUDA act only while they are set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...measure.flags import writable
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS, rounded

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

SIDE, LONG = 1024, 2**14
AMPERE = 8
"""The first capability with TF32 (CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True)
class Flag:
    """A flag, and the product that it may change: what it gives, and what is right, on a device."""

    owner: Any
    name: str
    dtype: torch.dtype
    product: Callable[[torch.device, torch.dtype, torch.Generator], tuple[Tensor, Tensor]]
    lost: float = 0.0
    """What TF32 loses of each element, half of which a library may take for other roundings; 0: all are exact."""
    demanded: bool = False
    """Whether it changes every large enough product on a device with TF32."""


def _fp32_product(device: torch.device, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """1024 times 1 + 2^-13, of which TF32 reads 1; every partial sum is a number of fp32."""
    seen = torch.matmul(torch.full((SIDE, SIDE), 1 + 2.0**-13, device=device), torch.ones(SIDE, SIDE, device=device))
    return seen, torch.full((SIDE, SIDE), SIDE * (1 + 2.0**-13))


def _fp32_convolution(device: torch.device, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.full((2, SIDE, 8, 8), 1 + 2.0**-13, device=device)
    seen = F.conv2d(images, torch.ones(64, SIDE, 1, 1, device=device))
    return seen, torch.full(seen.shape, SIDE * (1 + 2.0**-13))


def _long_sum(device: torch.device, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sums of 2^14 numbers of 1 to 2, multiples of 2^-5: fp32 holds every partial sum, 16 bits next to none."""
    numbers = 1 + torch.randint(0, 32, (LONG, 16), generator=rng) / 32
    right = rounded(numbers.double().sum(0), FORMATS[dtype]).to(dtype)
    seen = torch.mm(torch.ones(16, LONG, device=device, dtype=dtype), numbers.to(device, dtype))
    return seen, right.expand(16, 16)


FLAGS = {
    "tf32-products": Flag(matmul, "allow_tf32", torch.float32, _fp32_product, SIDE * 2.0**-13, demanded=True),
    "tf32-convolutions": Flag(cudnn, "allow_tf32", torch.float32, _fp32_convolution, SIDE * 2.0**-13),
    "fp16-accumulation": Flag(matmul, "allow_fp16_accumulation", torch.float16, _long_sum),
    "fp16-reduction": Flag(matmul, "allow_fp16_reduced_precision_reduction", torch.float16, _long_sum),
    "bf16-reduction": Flag(matmul, "allow_bf16_reduced_precision_reduction", torch.bfloat16, _long_sum),
}


def _has_tf32(target: Target) -> bool:
    if torch.version.hip is not None or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    return int(str(target.probe["capability"] or 0).partition(".")[0]) >= AMPERE


@contract("AMP-NUMERICS-103", on="cuda")
@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_precision(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    flag = FLAGS[name]
    if not hasattr(flag.owner, flag.name):
        case.unsupported(f"this torch has no flag {flag.name}")
    if flag.dtype is torch.bfloat16:
        case.require(target, flag.dtype)
    with full_precision("cuda"):
        for state in (False, True, False):
            with writable():
                setattr(flag.owner, flag.name, state)
            seen, right = flag.product(target.device, flag.dtype, rng)
            changed = int(((seen.cpu().double() - right.double()).abs() > flag.lost / 2).sum())
            if not state:
                case.equal(f"elements that are wrong while {flag.name} is off", changed, 0)
            elif flag.demanded and _has_tf32(target):
                case.at_least(f"elements that {flag.name} changes while it is on", changed, 1)
            else:
                case.note(f"elements that {flag.name} changes while it is on", changed)


CHILD = """
import sys, torch
torch.backends.cuda.matmul.allow_tf32 = True
left = torch.full((1024, 1024), 1 + 2.0**-13, device=sys.argv[1])
print(torch.matmul(left, torch.ones(1024, 1024, device=sys.argv[1])).unique().tolist())
"""
PATIENCE = 300.0
"""Seconds after which only a process that hangs is given up on."""


@contract("AMP-NUMERICS-104", on="cuda")
@needs("child processes")
@pytest.mark.parametrize("override", [deep("full", "0")])
def test_tf32_is_overridden(case: Case, target: Target, override: str) -> None:
    if torch.version.hip is not None:
        case.unsupported("NVIDIA_TF32_OVERRIDE is NVIDIA's")
    variables = {**os.environ, "NVIDIA_TF32_OVERRIDE": override}
    variables.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
    # A process of its own, since the libraries read the variable once.
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(target.device)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    case.equal("exit status of the process", done.returncode, 0)
    seen = done.stdout.strip()
    case.equal("a product with TF32 allowed and NVIDIA_TF32_OVERRIDE=0", seen, str([SIDE * (1 + 2.0**-13)]))
