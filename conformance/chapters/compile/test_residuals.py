"""Check that a float32 tensor that a compiled program combines with a 16-bit product keeps its digits."""

from __future__ import annotations

import random

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .residuals import ALL, SUMS, Pairs, combine, operands
from .support import compiler, dtypes_of, inductor


def judge(
    case: Case, target: Target, dtype: torch.dtype, backend: str, rng: torch.Generator, pairs: Pairs = ALL
) -> None:
    """Compare each result with the exact one: the products are exact, so that it is rounded once, to float32."""
    given = [operands(name, target.device, rng) for name, _ in pairs]

    def program(given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
            return combine(pairs, given)

    with torch.no_grad():
        seen = torch.compile(program, backend=backend, fullgraph=True)(given)
        eager = program(given)
    unit = 2 * FORMATS[torch.float32].unit_roundoff
    for (name, how), numbers, ours, theirs in zip(pairs, given, seen, eager, strict=True):
        exact = combine(((name, how),), [tuple(each.cpu().double() for each in numbers)])[0]
        limit = unit * max(float(exact.abs().max()), float(numbers[2].abs().max()))
        what = f"{dtype}: {how} of {name}"
        case.equal(f"{what}: type", ours.dtype, theirs.dtype)
        case.at_most(f"{what}: error in eager (control)", float((theirs.cpu().double() - exact).abs().max()), limit)
        case.at_most(f"{what}: error", float((ours.cpu().double() - exact).abs().max()), limit)


@contract("AMP-COMPILE-074")
@pytest.mark.parametrize("backend", [deep("standard", "aot_eager"), deep("standard", "aot_eager_decomp_partition")])
def test_graphs(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            judge(case, target, dtype, backend, rng)


@contract("AMP-COMPILE-074")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("standard", "some"), deep("full", "all")])
def test_kernels(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    """Compile all of them, or sums alone in the type that the seed chooses: a kernel takes seconds to compile."""
    dtypes = tuple(dtypes_of(case, target))
    chosen, pairs = (dtypes, ALL) if part == "all" else ((random.Random(case.seed).choice(dtypes),), SUMS)
    with compiler(case), inductor(case):
        for dtype in chosen:
            judge(case, target, dtype, "inductor", rng, pairs)
