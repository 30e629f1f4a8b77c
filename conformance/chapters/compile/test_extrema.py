"""Check the gradients of compiled reductions that pick an element of rows that are computed in 16 bits."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .extrema import GROUPS, ROUNDINGS, gradients, matrix, program
from .support import compiling, dtypes_of

OTHERS = [name for name in GROUPS if name != "few"]


def _judge(case: Case, target: Target, rng: torch.Generator, backend: str, group: str, *, region: bool) -> None:
    """Compare the gradients with those that eager computes in float64."""
    x, names = matrix(target.device, rng), GROUPS[group]
    exact = gradients(names, x.double(), program(names))
    for dtype in dtypes_of(case, target):
        with compiling(case, backend):
            call = torch.compile(program(names, dtype if region else None), backend=backend, fullgraph=True)
            seen = gradients(names, x if region else x.to(dtype), call)
        for name, found in seen.items():
            error = float((found.double() - exact[name]).abs().max() / exact[name].abs().max())
            limit = ROUNDINGS * FORMATS[dtype].unit_roundoff
            case.at_most(f"{name} in {dtype}: relative error of the gradient", error, limit)


@contract("AMP-COMPILE-089")
@pytest.mark.parametrize("group", ["few", *(deep("standard", name) for name in OTHERS)])
def test_decomposed_extrema(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    _judge(case, target, rng, "aot_eager_decomp_partition", group, region=False)


@contract("AMP-COMPILE-089")
@needs("compiled kernels")
@pytest.mark.parametrize("group", ["few", *(deep("standard", name) for name in OTHERS)])
def test_extrema_of_inductor(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    _judge(case, target, rng, "inductor", group, region=False)


@contract("AMP-COMPILE-089")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep("standard", "few"), *(deep("full", name) for name in OTHERS)])
def test_extrema_of_inductor_in_a_region(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    _judge(case, target, rng, "inductor", group, region=True)
