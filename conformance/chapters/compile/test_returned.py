"""Check that what compiled code returns has the types, values, flags and memory of what eager returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .returned import (
    COPIES,
    FUNCTIONAL,
    ITSELF,
    PROGRAMS,
    READ,
    Many,
    Program,
    numbers_of_two_types,
    reading_writes,
    written_copies,
    written_expanded,
    written_results,
)
from .support import compiling, dtypes_of, unlike, whole_numbers

BACKENDS = ["aot_eager_decomp_partition", deep("standard", "aot_eager"), deep("standard", "eager")]


def _in_a_region(program: Program, dtype: torch.dtype) -> Program:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, dtype=dtype, cache_enabled=False):
            return program(x, w)

    return run


def _memory(found: tuple[Tensor, ...], given: tuple[Tensor, Tensor]) -> list[int]:
    """Return for each tensor the first of results and arguments that has its memory."""
    places = [one.untyped_storage().data_ptr() for one in (*given, *found)]
    return [places.index(place) for place in places]


def _told(program: Program, x: Tensor, w: Tensor, grad: bool) -> dict[str, Any]:
    """Return what is to be seen of the results of a function, and of the gradients where there are any."""
    leaves = [one.clone().requires_grad_() for one in (x, w)]
    first = leaves[0] * 1
    with torch.set_grad_enabled(grad):
        found = program(first, leaves[1])
    told: dict[str, Any] = {
        "types": [one.dtype for one in found],
        "values": [one.tolist() for one in found],
        "which require a gradient": [one.requires_grad for one in found],
        "whose memory it is": _memory(found, (first, leaves[1])),
    }
    if any(told["which require a gradient"]):
        sums = [(one * 2.0**n).double().sum() for n, one in enumerate(found) if one.requires_grad]
        torch.stack(sums).sum().backward()
        told["gradients"] = [None if one.grad is None else one.grad.tolist() for one in leaves]
    return told


@contract("AMP-COMPILE-101")
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "under no_grad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_arguments(case: Case, target: Target, rng: torch.Generator, backend: str, grad: bool) -> None:
    x, w = whole_numbers(rng, target), whole_numbers(rng, target)
    for dtype in dtypes_of(case, target):
        for name, program in PROGRAMS.items():
            run = _in_a_region(program, dtype)
            with compiling(case, backend):
                torch._dynamo.reset()
                seen = _told(torch.compile(run, backend=backend, fullgraph=True), x, w, grad)
            wrong = {
                what: f"{seen.get(what)}, in eager {wanted}"[:200]
                for what, wanted in _told(run, x, w, grad).items()
                if seen.get(what) != wanted
            }
            case.equal(f"{dtype}, {name}: what is not as in eager", wrong, {})


WRITTEN = tuple(name for name in FUNCTIONAL if name != "index_fill")
KINDS: dict[str, tuple[Many, list[str]]] = {
    "copies": (written_copies(tuple(COPIES)), list(COPIES)),
    "itself": (written_results(tuple(ITSELF)), list(ITSELF)),
    "expanded": (written_expanded(WRITTEN), list(WRITTEN)),
    "filled": (written_expanded(("index_fill",)), ["index_fill"]),
    "reading": (reading_writes(tuple(READ)), list(READ)),
    "numbers": (numbers_of_two_types, ["a matrix"]),
}


@contract("AMP-COMPILE-101")
@pytest.mark.parametrize("kind", KINDS)
def test_writes_and_numbers(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    _judge(case, target, rng, kind, "aot_eager_decomp_partition")


@contract("AMP-COMPILE-101")
@needs("compiled kernels")
@pytest.mark.parametrize("kind", [deep("standard", kind) for kind in KINDS])
def test_writes_and_numbers_of_inductor(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    _judge(case, target, rng, kind, "inductor")


def _judge(case: Case, target: Target, rng: torch.Generator, kind: str, backend: str) -> None:
    """Compare what is returned, the gradients of it, and what the arguments are afterwards."""
    program, names = KINDS[kind]
    given = [whole_numbers(rng, target) for _ in names]

    def told(run: Many) -> dict[str, Tensor]:
        arguments = [one.clone().requires_grad_(kind == "numbers") for one in given]
        found = run(*arguments)
        if kind == "numbers":
            torch.stack([one.sum() for one in found if one.requires_grad]).sum().backward()
            arguments = [one.grad for one in arguments if one.grad is not None]
        results = {f"result {number}": one.detach() for number, one in enumerate(found)}
        return {**dict(zip(names, arguments, strict=True)), **results}

    expected = told(program)
    with compiling(case, backend):
        torch._dynamo.reset()
        seen = told(torch.compile(program, backend=backend, fullgraph=True))
    case.equal("what is not as in eager", unlike(seen, expected), [])
