"""Check what compiled programs leave in several tensors that they write to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .exchanged import PROGRAMS, Program, with_products
from .support import compiling, dtypes_of, unlike

SIZE = 4
ROWS = (2, 0, 3, 1)
# Of which types a, b and c are; None stands for the 16-bit type.
KINDS = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "mixed": (torch.float32, None, torch.float32),
    "low": (None, None, None),
}


@contract("AMP-COMPILE-093")
@pytest.mark.parametrize("kind", ["mixed", deep("standard", "float32"), deep("standard", "low")])
@pytest.mark.parametrize("backend", ["aot_eager", deep("full", "aot_eager_decomp_partition")])
def test_exchanges_in_graphs(case: Case, target: Target, rng: torch.Generator, backend: str, kind: str) -> None:
    _exchange(case, target, rng, backend, kind)


@contract("AMP-COMPILE-093")
@needs("compiled kernels")
@pytest.mark.parametrize("kind", [deep("standard", "float32"), deep("full", "mixed"), deep("full", "low")])
def test_exchanges_in_kernels(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    _exchange(case, target, rng, "inductor", kind)


def _exchange(case: Case, target: Target, rng: torch.Generator, backend: str, kind: str) -> None:
    """Run all programs in one graph, twice: each has matrices of its own, of small whole numbers."""
    rows = torch.tensor(ROWS, device=target.device)
    for dtype in dtypes_of(case, target):
        programs = {**PROGRAMS, **with_products(target.device_type, dtype)}
        kinds = [one or dtype for one in KINDS[kind]]
        given = {
            f"{name}, {letter}": torch.randint(-2, 3, (SIZE, SIZE), generator=rng).to(target.device, each)
            for name in programs
            for letter, each in zip("abc", kinds, strict=True)
        }
        with compiling(case, backend):
            compiled = torch.compile(_all_of(programs), backend=backend, fullgraph=True)
            for number in range(2):
                ours, theirs = ({name: one.clone() for name, one in given.items()} for _ in range(2))
                results, expected = compiled(ours, rows), _all_of(programs)(theirs, rows)
                what = f"{kind} and {dtype}, call {number}"
                _alike(case, what, programs, {**ours, **results}, {**theirs, **expected})
                # A result that is a copy stays one: a write to it leaves the argument alone.
                for one in (*results.values(), *expected.values()):
                    one.add_(1)
                _alike(case, f"{what}, after a write to the results", programs, ours, theirs)
                given = theirs


def _all_of(programs: dict[str, Program]) -> Any:
    def call(given: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        results = {}
        for name, one in programs.items():
            a, b, c = (given[f"{name}, {letter}"] for letter in "abc")
            results[name] = one(a, b, c, rows)
        return {f"{name}, result": one for name, one in results.items() if one is not None}

    return call


def _alike(
    case: Case, what: str, programs: dict[str, Program], ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    found = unlike(ours, theirs)
    for name in programs:
        wrong = [one for one in found if one.startswith(f"{name},")]
        case.equal(f"{name}: what is not as in eager, {what}", wrong, [])
