"""Check vmap of exact programs in every arrangement, and its randomness, in a region."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.trace.ops import OpTrace
from .batched_ways import WAYS, BatchedWay, Function, loop
from .derivative_ways import Inputs
from .derivatives import PLACES, wide_products
from .exact_programs import BY_NAME

pytestmark = pytest.mark.usefixtures("one_thread")
# AMP-TRANSFORM-003 judges the ops that vmap takes apart: convolutions, and products that add a tensor.
_NAMES = ("mm", "matmul", "bmm", "einsum", "linear", "attention", "residual", "mlp", "float32-term")
_FEW = ("mm", "mlp", "float32-term")
_QUICK = ("vmap", "chunks", "last-dimension", "nested", "vmap-of-grad")
_BATCH = 4


@contract("AMP-TRANSFORM-006")
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.name) if way.name in _QUICK else deep("standard", way, id=way.name) for way in WAYS],
)
def test_vmap_of_programs(case: Case, target: Target, way: BatchedWay, place: str) -> None:
    found: dict[str, Any] = {}
    for number, name in enumerate(_FEW if case.level == "quick" else _NAMES):
        program, dtypes = BY_NAME[name], case.supported(target)
        for dtype in dtypes if case.level == "full" else (dtypes[number % len(dtypes)],):
            function, outer = PLACES[place](program.function, functools.partial(target.autocast, dtype))
            for given in (torch.float32, dtype) if name in _FEW else (torch.float32,):
                batch = tuple(one.to(given) for one in program.inputs(target.device, batch=_BATCH))
                text = _fault_of(way, function, outer, batch, dtype)
                if text is not None:
                    found[f"{name} of {given}, {dtype}"] = text
    case.equal(f"programs whose {way.name}, region {place}, is not the loop over samples", found, {})


def _fault_of(
    way: BatchedWay,
    function: Function,
    outer: Callable[[], AbstractContextManager[object]],
    batch: Inputs,
    dtype: torch.dtype,
) -> str | None:
    """Say how a way to batch a function differs from the loop over samples, or return None."""
    with outer():
        wanted = loop(function, batch, gradients=way.gradients)
    with outer(), OpTrace() as trace:
        seen = way.run(function, batch)
    pairs = zip(seen, wanted, strict=True)
    if all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs):
        return wide_products(trace, dtype)
    return f"{seen} in place of {wanted}"


@contract("AMP-TRANSFORM-007")
@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_randomness(case: Case, target: Target, randomness: str) -> None:
    for dtype in case.supported(target):
        x = torch.ones(4, 8, 8, device=target.device)
        weight = torch.eye(8, device=target.device)

        def dropped(row: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return F.dropout(torch.mm(row, weight), 0.5)

        mapped = torch.func.vmap(dropped, randomness=randomness)
        with target.autocast(dtype):
            if randomness == "error":
                case.raises(
                    f"{dtype}: dropout under vmap", RuntimeError, functools.partial(mapped, x), names=("randomness",)
                )
                torch.manual_seed(0)
                case.equal(f"{dtype}: type without random ops", torch.func.vmap(torch.mm)(x, x).dtype, dtype)
                continue
            torch.manual_seed(0)
            seen = mapped(x)
        case.equal(f"{dtype}: type", seen.dtype, dtype)
        case.equal(f"{dtype}: values of kept and dropped elements", sorted(set(seen.flatten().tolist())), [0.0, 2.0])
        alike = [bool(torch.equal(seen[0], one)) for one in seen[1:]]
        case.equal(f"{dtype}: samples with the mask of the first", alike, [randomness == "same"] * 3)
