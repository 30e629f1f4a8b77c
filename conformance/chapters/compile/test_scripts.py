"""Check programs with regions that torch.jit.script compiles and torch.fx.symbolic_trace records."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.compilers import without_torchscript
from .scripted_programs import OPS, REGIONS, product
from .support import ambient, dtypes_of

# The profiling executor runs a program twice before it compiles it.
CALLS = 3


def _scripted(case: Case, program: Callable[..., object]) -> Any:
    if reason := without_torchscript():
        case.untestable(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated in newer versions
        return torch.jit.script(program)


def _operands(target: Target, rng: torch.Generator) -> list[torch.Tensor]:
    # Exact in 16 bits, as are sums of two products.
    return [torch.randint(-4, 5, (2, 2), generator=rng).float().to(target.device) for _ in range(2)]


def _agrees(case: Case, what: str, call: Any, program: Callable[..., object], x: torch.Tensor, w: torch.Tensor) -> None:
    expected = tree_leaves(program(x, w))
    for number in range(CALLS):
        seen = tree_leaves(call(x, w))
        types = [str(tensor.dtype) for tensor in seen]
        case.equal(f"{what}types of call {number}", types, [str(tensor.dtype) for tensor in expected])


@contract("AMP-COMPILE-007", on="cpu", dtypes=("bf16",))
@pytest.mark.parametrize("name", [*REGIONS, *(deep("standard", name) for name in OPS)])
def test_scripted_regions(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = {**REGIONS, **OPS}[name]
    _agrees(case, "", _scripted(case, program), program, *_operands(target, rng))


@contract("AMP-COMPILE-007")
def test_scripted_program_in_a_region(case: Case, target: Target, rng: torch.Generator) -> None:
    call, (x, w) = _scripted(case, product), _operands(target, rng)
    for dtype in dtypes_of(case, target):
        regions = {
            "no region": ambient(target, dtype, enabled=False),
            "a region": ambient(target, dtype),
            "a disabled region": ambient(target, dtype, enabled=False),
        }
        for name, opened in regions.items():
            with opened():
                _agrees(case, f"{dtype}, {name}: ", call, product, x, w)


@contract("AMP-COMPILE-008", on="cpu", dtypes=("bf16",))
@pytest.mark.parametrize("name", REGIONS)
def test_recorded_regions(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = REGIONS[name]
    _agrees(case, "", torch.fx.symbolic_trace(program), program, *_operands(target, rng))


@contract("AMP-COMPILE-008")
def test_recorded_program_in_a_region(case: Case, target: Target, rng: torch.Generator) -> None:
    call, (x, w) = torch.fx.symbolic_trace(product), _operands(target, rng)
    for dtype in dtypes_of(case, target):
        for name, enabled in (("a region", True), ("a disabled region", False)):
            with torch.autocast(target.device_type, dtype=dtype, enabled=enabled):
                _agrees(case, f"{dtype}, {name}: ", call, product, x, w)
