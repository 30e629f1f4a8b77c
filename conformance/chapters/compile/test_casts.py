"""Check the ops and casts of compiled graphs, forward and backward, against those that eager runs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .observation import observed
from .programs import AMBIENT, PROGRAMS, Program
from .recorded_ops import PARTS, RecordedOps
from .support import ambient, bound, compiler, dtypes_of

# Batch normalization has ops of other names in a graph.
NAMES = tuple(name for name in PROGRAMS if name != "convolution")
QUICK = ("nested",)


def recorded(
    program: Program, target: Target, dtype: torch.dtype, rng: torch.Generator, cache: bool | None
) -> tuple[RecordedOps, RecordedOps]:
    """Return the ops of the program in eager and compiled."""
    leaves = program.leaves(target.device, rng)
    around = ambient(target, dtype, cache_enabled=cache) if program.name in AMBIENT else contextlib.nullcontext
    options: dict[str, Any] = {"around": around, "around_backward": around}
    eager, graph = RecordedOps(), RecordedOps()
    call = bound(program, target, dtype, cache=cache)
    observed(call, leaves, watch=eager.watch, **options)
    observed(torch.compile(call, backend=graph.backend(), fullgraph=True), leaves, **options)
    return eager, graph


STANDARD = ("float32_ops", "attention", "classifier", "island_inside")
CASES = [
    deep("quick" if name in QUICK else "standard" if name in STANDARD else "full", name) for name in (*NAMES, *AMBIENT)
]


@contract("AMP-COMPILE-010")
@pytest.mark.parametrize("name", CASES)
def test_ops(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = PROGRAMS.get(name) or AMBIENT[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            eager, graph = recorded(program, target, dtype, rng, cache=False)
            for part in PARTS:
                case.equal(f"{dtype}: ops of the {part}", graph.computing(part), eager.computing(part))
                case.equal(f"{dtype}: casts of the {part}", graph.casts(part), eager.casts(part))


@contract("AMP-COMPILE-011")
@pytest.mark.parametrize("name", [deep("standard" if name == "tied" else "full", name) for name in NAMES])
def test_casts_with_the_cache(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            kept, graph = recorded(PROGRAMS[name], target, dtype, rng, cache=None)
            made, _ = recorded(PROGRAMS[name], target, dtype, rng, cache=False)
            for part in PARTS:
                few, many = kept.casts(part), made.casts(part)
                case.equal(f"{dtype}: kinds of casts in the {part}", list(graph.casts(part)), list(few))
                for kind, count in graph.casts(part).items():
                    case.between(f"{dtype}: casts of {kind} in the {part}", count, few[kind], many[kind])
