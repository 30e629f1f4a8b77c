"""Check that functions with a dtype argument compute in that dtype, and not in the 16 bits of their operand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target

ROWS, COLUMNS = 40, 50
ROUNDINGS = 2.0**8  # of the dtype: fewer than those of a product of 50 factors; 2^8 fewer than one of fp16 to 16 bits

# Every function of torch that documents a dtype to which its input is cast before the operation.
ASKED: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "sum of rows": lambda x, dtype: x.sum(-1, dtype=dtype),
    "sum of columns": lambda x, dtype: torch.sum(x, 0, keepdim=True, dtype=dtype),
    "sum of two dimensions": lambda x, dtype: x[None].sum((1, 2), dtype=dtype),
    "nansum": lambda x, dtype: x.nansum(-1, dtype=dtype),
    "mean": lambda x, dtype: x.mean(dtype=dtype),
    "mean of rows": lambda x, dtype: torch.mean(x, 1, dtype=dtype),
    "mean of columns": lambda x, dtype: x.mean((0,), keepdim=True, dtype=dtype),
    "nanmean": lambda x, dtype: x.nanmean(-1, dtype=dtype),
    "prod": lambda x, dtype: x[0].prod(dtype=dtype),
    "prod of rows": lambda x, dtype: x.prod(-1, dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(-1, dtype=dtype),
    "cumsum of columns": lambda x, dtype: torch.cumsum(x, 0, dtype=dtype),
    "cumprod": lambda x, dtype: x.cumprod(-1, dtype=dtype),
    "norm": lambda x, dtype: torch.norm(x, dim=-1, dtype=dtype),
    "norm of order 1": lambda x, dtype: torch.norm(x, p=1, dim=0, dtype=dtype),
    "vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
    "vector_norm of order 1": lambda x, dtype: torch.linalg.vector_norm(x, 1, -1, dtype=dtype),
    "matrix_norm": lambda x, dtype: torch.linalg.matrix_norm(x, dtype=dtype),
    "matrix_norm of order 1": lambda x, dtype: torch.linalg.matrix_norm(x, 1, dtype=dtype),
    "linalg.norm": lambda x, dtype: torch.linalg.norm(x, dim=-1, dtype=dtype),
    "softmax": lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    "softmax as a method": lambda x, dtype: x.softmax(0, dtype=dtype),
    "special.softmax": lambda x, dtype: torch.special.softmax(x, -1, dtype=dtype),
    "softmin": lambda x, dtype: F.softmin(x, -1, dtype=dtype),
    "log_softmax": lambda x, dtype: F.log_softmax(x, -1, dtype=dtype),
    "log_softmax as a method": lambda x, dtype: x.log_softmax(0, dtype=dtype),
    "masked.sum": lambda x, dtype: torch.masked.sum(x, -1, dtype=dtype),
    "masked.mean": lambda x, dtype: torch.masked.mean(x, -1, dtype=dtype),
    "masked.softmax": lambda x, dtype: torch.masked.softmax(x, -1, dtype=dtype),
}


@contract("AMP-NUMERICS-111")
@pytest.mark.parametrize("asked", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("region", [True, False], ids=["region", "outside"])
def test_dtypes_that_are_asked_for(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, asked: torch.dtype, region: bool
) -> None:
    case.require_arithmetic(target, asked)
    # Within a sixteenth of 1, so that no product overflows, and of no number of 16 bits.
    given = (1 + (torch.rand(ROWS, COLUMNS, generator=rng) - 0.5) / 8).to(amp_dtype)
    found: dict[str, object] = {}
    for name, function in ASKED.items():
        exact = function(given.double(), torch.float64)
        with target.autocast(amp_dtype) if region else contextlib.nullcontext():
            seen = function(given.to(target.device), asked)
        error = float(((seen.detach().cpu().double() - exact) / exact).abs().max())
        if seen.dtype != asked:
            found[name] = seen.dtype
        elif not error <= ROUNDINGS * torch.finfo(asked).eps / 2:
            found[name] = error
    case.equal("functions with another type, or a relative error beyond that type's roundings", found, {})
