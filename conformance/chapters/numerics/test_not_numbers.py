"""Check that a NaN reaches every result that reads it, and no other."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .not_numbers import readers

pytestmark = pytest.mark.usefixtures("one_thread")


@contract("AMP-NUMERICS-138")
@pytest.mark.parametrize("place", ["outside", "in"])
def test_reach_of_not_a_number(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    """Operands are 16-bit outside of a region, and float32 in one."""
    generator = torch.Generator().manual_seed(case.seed)
    region = partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    dtype = torch.float32 if place == "in" else amp_dtype
    every = {reader.name: reader for reader in readers()}
    tried = {
        name: partial(reader.op, torch.ones(reader.shape, dtype=dtype, device=target.device))
        for name, reader in every.items()
    }
    wrong, judged = {}, 0
    for name in case.with_kernels(target, tried):
        reader = every[name]
        numbers = torch.rand(reader.shape, generator=generator) + 0.25
        count = numbers.numel()
        for at in sorted({0, count // 2, count - 1, int(torch.randint(count, (), generator=generator))}):
            mask = torch.zeros(count, dtype=torch.float64)
            mask[at] = 1
            x = numbers.flatten().masked_fill(mask > 0, torch.nan).view(reader.shape)
            wanted = reader.reaches(mask.view(reader.shape)) > 0
            with region():
                seen = reader.op(x.to(target.device, dtype)).isnan().cpu()
            judged += 1
            if not torch.equal(seen if reader.alone else seen & wanted, wanted):
                wrong[f"{name}, NaN at {at}"] = f"{int(seen.sum())} NaNs, not {int(wanted.sum())}"
    case.enough(target, "calls judged", judged)
    case.equal("results that a NaN should reach, or should not", wrong, {})
