"""Check vmap of exact programs in every arrangement, and its randomness, in a region."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.trace.ops import OpTrace
from .batched_ways import WAYS, BatchedWay, Function, loop
from .derivative_ways import Inputs
from .derivatives import PLACES, wide_products
from .exact_programs import BY_NAME, TAIL

pytestmark = pytest.mark.usefixtures("one_thread")
# AMP-TRANSFORM-003 judges the ops that vmap takes apart: convolutions, and products that add a tensor.
_NAMES = ("mm", "matmul", "bmm", "einsum", "linear", "attention", "residual", "mlp", "float32-term")
_FEW = ("mm", "mlp", "float32-term")
_QUICK = ("vmap", "chunks", "last-dimension", "nested", "vmap-of-grad")
_BATCH = 4
PLACES_OF_BATCH: dict[str, Callable[[int], range]] = {
    "the first dimension": lambda rank: range(1),
    "a later dimension": lambda rank: range(1, rank + 1),
    "a dimension that is counted from the end": lambda rank: range(-rank - 1, 0),
}


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


def _several(x: Tensor, given: dict[str, Tensor]) -> dict[str, Any]:
    """Return three tensors of two dimensions, and one of one, in containers."""
    product = torch.mm(x, given["weight"])
    return {"product": product, "rest": (product + given["bias"], [product.mT @ x, product.sum(0)])}


@contract("AMP-TRANSFORM-006")
def test_chunks_of_several_tensors(case: Case, target: Target, rng: torch.Generator) -> None:
    """Map each input over a dimension of its own and give each output one, in chunks of every size."""
    draws, wrong = random.Random(case.seed), {}
    samples = 5
    shapes = ((2, 3), (3, 4), (4,))
    for dtype, _ in itertools.product(case.supported(target), range(case.samples(quick=6, standard=20, full=60))):
        # Integers, whose products and sums are exact, and a remainder that the 16-bit types round away.
        values = [
            torch.randint(-2, 3, (samples, *shape), generator=rng).to(target.device) * (1 + TAIL) for shape in shapes
        ]
        mapped: list[int | None] = [draws.randrange(-len(shape) - 1, len(shape) + 1) for shape in shapes]
        for place in (1, 2):
            mapped[place] = draws.choice((mapped[place], mapped[place], None))
        x, weight, bias = (
            one[0] if dim is None else one.movedim(0, dim) for one, dim in zip(values, mapped, strict=True)
        )
        out = [draws.randrange(-3, 3) for _ in range(3)] + [draws.randrange(-2, 2)]
        in_dims = (mapped[0], {"weight": mapped[1], "bias": mapped[2]})
        out_dims = {"product": out[0], "rest": (out[1], [out[2], out[3]])}
        with target.autocast(dtype):
            each = [
                pytree.tree_leaves(_several(a, {"weight": b, "bias": c}))
                for a, b, c in (
                    [one[0 if dim is None else at] for one, dim in zip(values, mapped, strict=True)]
                    for at in range(samples)
                )
            ]
            expected = [torch.stack(parts, dim) for parts, dim in zip(zip(*each, strict=True), out, strict=True)]
            for size in (None, 1, 2, 3, 4, 5, 7):
                batched = torch.func.vmap(_several, in_dims, out_dims, chunk_size=size)
                seen = pytree.tree_leaves(batched(x, {"weight": weight, "bias": bias}))
                alike = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(seen, expected, strict=True)]
                if not all(alike):
                    wrong[f"{dtype}, {in_dims} to {out_dims}, chunks of {size}"] = alike
    case.equal("outputs that equal the loop over samples, where not all do", dict(list(wrong.items())[:3]), {})


@contract("AMP-TRANSFORM-006")
def test_outputs_that_are_not_mapped(case: Case, target: Target) -> None:
    """Repeat an output that does not depend on the samples along the dimension that out_dims names."""
    samples = torch.ones(4, 2, device=target.device)
    shapes: list[tuple[int, ...]] = [(), (4,), (3,), (4, 4), (2, 3)]
    for what, places in PLACES_OF_BATCH.items():
        wrong = {}
        for dtype, shape, size in itertools.product(case.supported(target), shapes, (None, 3)):
            constant = torch.arange(float(math.prod(shape)), device=target.device).view(shape)
            for dim in places(len(shape)):
                call = torch.func.vmap(lambda x, constant=constant: (x.sum(), constant), 0, (0, dim), chunk_size=size)
                try:
                    with target.autocast(dtype):
                        seen = call(samples)[1]
                    alike = torch.equal(seen, torch.stack([constant] * len(samples), dim))
                except RuntimeError as error:
                    alike, seen = False, error
                if not alike:
                    wrong[f"{dtype}, {shape} to {dim}, chunks of {size}"] = str(seen)[:80]
        case.equal(f"tensors that are not repeated along {what}", wrong, {})
        if wrong:
            break  # a torch that fails here writes outside of a list for dimensions below zero


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
