"""Check that a function that torch.compile traces once for all its calls follows the region around each call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from ...harness.check import Case, contract, deep
from ...harness.targets import Target, is_foreign
from .observation import Observed, observed
from .support import compiler, dtypes_of, inner_type

Opening: TypeAlias = Callable[[], AbstractContextManager[Any]]
Part: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def surroundings(target: Target, dtype: torch.dtype) -> dict[str, Opening]:
    """Return what opens each state that a call may be made in."""

    def region(**options: Any) -> Opening:
        return lambda: torch.autocast(target.device_type, cache_enabled=False, **options)

    return {
        "no region": contextlib.nullcontext,
        str(dtype): region(dtype=dtype),
        str(inner_type(target, dtype)): region(dtype=inner_type(target, dtype)),
        "a disabled region": region(enabled=False),
        "no_grad": torch.no_grad,
    }


def calling(parts: Sequence[Part], opened: Sequence[Opening]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return a program that calls each part inside what is opened for it."""

    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        outputs = []
        for part, opening in zip(parts, opened, strict=True):
            with opening():
                outputs.append(part(x, weight))
        return outputs

    return program


def differing(seen: Observed, expected: Observed) -> list[str]:
    """Return the tensors that only one run has, or that are of another type or of other bits, each with its types."""

    def equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
        if ours is None or theirs is None:
            return ours is theirs
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)

    pairs = {
        name: (seen.values.get(name), expected.values.get(name)) for name in sorted({*seen.values, *expected.values})
    }
    return [
        f"{name}: {_type(ours)} for {_type(theirs)}"
        for name, (ours, theirs) in pairs.items()
        if not equal(ours, theirs)
    ]


def _type(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(tensor.dtype)


def _pairs(case: Case, names: Mapping[str, object], dtype: torch.dtype) -> list[tuple[str, str]]:
    """Return the states of two calls: all pairs at full, else two and some more by the seed."""
    always = [(str(dtype), str(dtype)), (str(dtype), "no region")]
    more = [(first, second) for first in names for second in names if (first, second) not in always]
    return always + random.Random(case.seed).sample(more, case.samples(quick=0, standard=6, full=len(more)))


@contract("AMP-COMPILE-080")
@pytest.mark.parametrize("functions", ["one", deep("standard", "two")])
@pytest.mark.parametrize("backend", ["aot_eager", deep("full", "inductor")])
def test_calls_in_other_regions(case: Case, target: Target, rng: torch.Generator, functions: str, backend: str) -> None:
    """Small whole numbers, of which every result is exact: what differs is a type, or a gradient that is missing."""
    repeated = getattr(torch.compiler, "nested_compile_region", None)
    if repeated is None:
        case.unsupported("torch.compiler.nested_compile_region came with torch 2.8")

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).relu()

    def two(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).neg()

    parts = (one, one if functions == "one" else two)
    leaves = tuple(
        torch.randint(-3, 4, (4, 4), generator=rng).to(target.device, torch.float32).requires_grad_() for _ in range(2)
    )
    for dtype in dtypes_of(case, target):
        opened = surroundings(target, dtype)
        for pair in _pairs(case, opened, dtype):
            openings = [opened[name] for name in pair]
            with compiler(case):
                marked = [repeated(part) for part in parts] if functions == "two" else [repeated(one)] * 2
                try:
                    seen = observed(torch.compile(calling(marked, openings), backend=backend), leaves)
                except Exception as error:
                    if not is_foreign(target.device_type) or "find kernel for HigherOrderOperator" not in str(error):
                        raise
                    case.unsupported(f"torch calls no marked function in a region of {target.device_type}")
            expected = observed(calling(parts, openings), leaves)
            words = f"{pair[0]} twice" if pair[0] == pair[1] else f"{pair[0]} then {pair[1]}"
            case.equal(f"{words}: what is not as in eager", differing(seen, expected), [])
