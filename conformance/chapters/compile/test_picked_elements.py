"""Check the indices that compiled pools, sorts and reductions return of views, against eager."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .picked_elements import OPS, images
from .support import compiling, drawn, dtypes_of, unlike

SOME = 4  # where not all are compiled
# A kernel takes seconds to compile: these are always there, as their waivers would be stale without them.
ALWAYS = ("max_pool2d by 6 of transposed images", "argmax of all of transposed images")


def _agree(case: Case, target: Target, rng: torch.Generator, backend: str, dtype: torch.dtype) -> None:
    x = images(dtype, target.device, rng)
    every = len(OPS) // 4 if backend == "inductor" else len(OPS)
    number = {"quick": SOME, "standard": SOME if backend == "inductor" else every, "full": every}[case.level]
    chosen = {**{name: OPS[name] for name in ALWAYS}, **drawn(OPS, rng, number)}
    expected: dict[str, Tensor] = {}
    for name, op in chosen.items():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # some devices have no kernel of 16 bits
            expected[name] = op(x)
    names = tuple(expected)

    def program(x: Tensor) -> dict[str, Tensor]:
        return {name: OPS[name](x) for name in names}

    with compiling(case, backend):
        seen = torch.compile(program, backend=backend, fullgraph=True)(x)
    case.at_least(f"{dtype}: results", len(names), 1)
    for name, right in expected.items():
        case.equal(f"{dtype}: {name}, unlike eager's", unlike({name: seen[name]}, {name: right}), [])


@contract("AMP-COMPILE-004")
def test_decomposed_indices(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in dtypes_of(case, target):
        _agree(case, target, rng, "aot_eager_decomp_partition", dtype)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_indices_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree(case, target, rng, "inductor", dtype)
