"""Check that compiled ops of 16-bit tensors give eager's bits where no rounding can move them."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .special_values import every, operands
from .support import compiler, dtypes_of, inductor, unlike


def _agree(case: Case, target: Target, rng: torch.Generator, backend: str, dtype: torch.dtype) -> None:
    given = operands(dtype, target.device, rng)

    def call(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
            return every(dtype, given)

    with compiler(case), inductor(case) if backend == "inductor" else contextlib.nullcontext():
        ours = {name: one.clone() for name, one in given.items()}
        seen = torch.compile(call, backend=backend, fullgraph=True)(ours)
        expected = call({name: one.clone() for name, one in given.items()})
    # Half a unit of roundoff: batch_norm computes in float32 and rounds once, its statistics not at all.
    wrong = unlike(seen, expected, _equal)
    case.at_least(f"{dtype}: results", len(expected), 40)
    case.equal(f"{dtype}: results that are not those of eager", wrong[:4], [])


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    bound = 2 * torch.finfo(theirs.dtype).eps if theirs.dtype is torch.float32 else 0.0
    return torch.allclose(ours, theirs, rtol=bound, atol=0.0, equal_nan=True)


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("backend", [deep("standard", "aot_eager_decomp_partition")])
def test_decomposed_special_values(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    for dtype in dtypes_of(case, target):
        _agree(case, target, rng, backend, dtype)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "float16"), deep("full", "bfloat16")])
def test_special_values_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree(case, target, rng, "inductor", dtype)
