"""Check that compiled ops of 16-bit tensors give eager's bits where no rounding can move them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .exact_functions import calls, integers, numbers
from .exact_ops import GROUPS, NEAR_ZERO, OPS, Op, matrix, small
from .special_values import every, operands
from .support import compiling, drawn, dtypes_of, unlike


def _agree(case: Case, target: Target, rng: torch.Generator, backend: str, dtype: torch.dtype) -> None:
    given = operands(dtype, target.device, rng)

    def call(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
            return every(dtype, given)

    with compiling(case, backend):
        ours = {name: one.clone() for name, one in given.items()}
        seen = torch.compile(call, backend=backend, fullgraph=True)(ours)
        expected = call({name: one.clone() for name, one in given.items()})
    # Half a unit of roundoff: batch_norm computes in float32 and rounds once, its statistics not at all.
    wrong = unlike(seen, expected, _equal)
    case.at_least(f"{dtype}: results", len(expected), 40)
    case.equal(f"{dtype}: results that are not those of eager", wrong[:4], [])


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    bound = 2 * torch.finfo(theirs.dtype).eps if theirs.dtype is torch.float32 else 0.0
    return torch.allclose(ours, theirs, rtol=bound, atol=0.0, equal_nan=True)


SOME = 6  # of the exact ops, at quick
ROWS = (6, 10)


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("backend", [deep("standard", "aot_eager_decomp_partition")])
def test_decomposed_special_values(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    for dtype in dtypes_of(case, target):
        _agree(case, target, rng, backend, dtype)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "float16"), deep("full", "bfloat16")])
def test_special_values_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree(case, target, rng, "inductor", dtype)


# The decomposition of these asks the code generator of the device, which one without compiled kernels does not have.
ASKING = ("masked_scatter",)


def _agree_exactly(
    case: Case, target: Target, chosen: Mapping[str, Op], rng: torch.Generator, dtype: torch.dtype, backend: str
) -> None:
    """Compile exact ops as one program, and call it with matrices of several sizes."""
    sizes = ROWS if case.level != "quick" else ROWS[:1]

    def call(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: op(x) for name, op in chosen.items()}

    with compiling(case, backend):
        compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=len(sizes) > 1)
        for rows in sizes:
            x = matrix(rows, dtype, target.device, rng)
            wrong = unlike(compiled(x), call(x), _equal)
            case.equal(f"{dtype}, {rows} rows: results that are not those of eager", wrong[:4], [])


def _taken(target: Target, ops: Mapping[str, Op]) -> dict[str, Op]:
    without = ASKING if target.lacks("compiled kernels") else ()
    return {name: op for name, op in ops.items() if name not in without}


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("ops", ["some", *(deep("standard", group) for group in GROUPS)])
def test_decomposed_exact_ops(case: Case, target: Target, rng: torch.Generator, ops: str) -> None:
    for dtype in dtypes_of(case, target):
        chosen = drawn(_taken(target, OPS), rng, SOME) if ops == "some" else _taken(target, GROUPS[ops])
        _agree_exactly(case, target, chosen, rng, dtype, "aot_eager_decomp_partition")


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_exact_ops_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    chosen = _taken(target, OPS)
    if case.level == "standard":
        chosen = drawn(chosen, rng, SOME)
    _agree_exactly(case, target, chosen, rng, dtype, "inductor")


def _agree_near_zero(case: Case, target: Target, rng: torch.Generator, backend: str, names: tuple[str, ...]) -> None:
    """Functions whose difference from their argument is below half of a unit in the last place give the argument."""
    for dtype in dtypes_of(case, target):
        x = small(matrix(6, dtype, target.device, rng))

        def call(x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: getattr(torch, name)(x) for name in names}

        with compiling(case, backend):
            seen = torch.compile(call, backend=backend, fullgraph=True)(x)
        case.equal(f"{dtype}: eager results that are not the argument", unlike(call(x), dict.fromkeys(names, x)), [])
        case.equal(f"{dtype}: results that are not the argument", unlike(seen, dict.fromkeys(names, x)), [])


@contract("AMP-COMPILE-004")
def test_decomposed_functions_near_zero(case: Case, target: Target, rng: torch.Generator) -> None:
    names = tuple(name for group in NEAR_ZERO.values() for name in group)
    _agree_near_zero(case, target, rng, "aot_eager_decomp_partition", names)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep("standard", group, id=group.replace(" ", "-")) for group in NEAR_ZERO])
def test_functions_near_zero_of_inductor(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    _agree_near_zero(case, target, rng, "inductor", NEAR_ZERO[group])


COUNT = {"quick": 1024, "standard": 4096, "full": 65536}
SOME_OF_BITS = 8  # of the functions, where not all are compiled
# A kernel takes seconds to compile: this one is always there, as its waiver would be stale without it.
ALWAYS = "nextafter"
# Which of two zeros is the larger one, and what is left of an integer, is open.
OF_ANY_ZERO = (
    "frac",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "relu",
    "relu6",
    "clamped",
    "clamped from below",
    "clamped from above",
)


def _agree_on_bits(case: Case, target: Target, rng: torch.Generator, backend: str, dtype: torch.dtype) -> None:
    """Compile exact functions of one and of two numbers as one program, and call it with numbers of any bits."""
    x, y = numbers(dtype, target.device, COUNT[case.level], rng)
    a, b = integers(dtype, target.device, rng)
    chosen = calls()
    if case.level == "quick" or (backend == "inductor" and case.level == "standard"):
        chosen = {ALWAYS: chosen[ALWAYS], **drawn(chosen, rng, SOME_OF_BITS)}

    def program(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: call(*given) for name, call in chosen.items()}

    with compiling(case, backend):
        seen = torch.compile(program, backend=backend, fullgraph=True)(x, y, a, b)
    for name, right in program(x, y, a, b).items():
        ours = seen[name]
        if name in OF_ANY_ZERO:
            ours, right = ours + 0.0, right + 0.0
        case.identical(f"{dtype}: {name}", ours, right)


@contract("AMP-COMPILE-004")
def test_decomposed_functions_of_bits(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in dtypes_of(case, target):
        _agree_on_bits(case, target, rng, "aot_eager_decomp_partition", dtype)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_functions_of_bits_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree_on_bits(case, target, rng, "inductor", dtype)
