"""Check that a Python number that changes between the calls of a compiled program is in force in each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from .changing_numbers import FEW, OPS, PLACES, SEQUENCES, SOME, Program, operands, program
from .support import caches, compiler, dtypes_of, unlike

Tensors = tuple[torch.Tensor, torch.Tensor]


def _judge(
    case: Case, target: Target, rng: torch.Generator, backend: str, place: str, kind: str, names: Sequence[str]
) -> None:
    """Call a program with each number of the sequence: results, and gradients where there are any, are eager's."""
    for dtype in dtypes_of(case, target):
        given = operands(target.device, rng)
        plain = program(names)

        def compiled(function: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
            made: Callable[..., list[torch.Tensor]] = torch.compile(function, backend=backend)
            return made

        called, expected = PLACES[place](plain, compiled), PLACES[place](plain, lambda function: function)
        for number, n in enumerate(SEQUENCES[kind]):
            with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
                seen, wanted = _results(names, given, called, n), _results(names, given, expected, n)
            found = unlike(seen, wanted)
            case.equal(f"{dtype}, call {number} with {n!r}: results unlike eager's", found[:4], [])


def _results(names: Sequence[str], given: Tensors, call: Program, n: float) -> dict[str, torch.Tensor]:
    """Return each result of a call by its op and type, and the gradient of the sum of all."""
    results = call(*given, n)
    found = {f"{name} of {each.dtype}": each.detach() for name, each in zip((*names, *names), results, strict=True)}
    if terms := [each.float().sum() for each in results if each.requires_grad]:
        found["gradient"] = torch.autograd.grad(sum(terms[1:], terms[0]), given[0])[0]
    return found


@contract("AMP-COMPILE-076")
@pytest.mark.parametrize("kind", ["float", deep("standard", "int")])
@pytest.mark.parametrize("place", [by_seed("quick", 1, place, id=place) for place in PLACES])
def test_graphs(case: Case, target: Target, rng: torch.Generator, place: str, kind: str) -> None:
    with compiler(case):
        _judge(case, target, rng, "aot_eager", place, kind, SOME if case.level == "quick" else tuple(OPS))


@contract("AMP-COMPILE-076")
@needs("compiled kernels")
@pytest.mark.parametrize(
    ("trained", "names", "place"),
    [
        *(by_seed("standard", 1, False, FEW, place, id=f"inference-{place}") for place in PLACES),
        *(deep("full", True, FEW, place, id=f"training-{place}") for place in PLACES),
        *(deep("full", trained, tuple(OPS), "argument", id=f"all-{trained}") for trained in (False, True)),
    ],
)
def test_kernels(
    case: Case, target: Target, rng: torch.Generator, trained: bool, names: Sequence[str], place: str
) -> None:
    """An op that a graph computes beside some that take the number, with the caches on disk, as by default.

    A cache may serve the graph of the second number, in which it varies, for the third. A graph with a region in it may
    go past the caches: the region is around the calls.
    """
    with compiler(case), tempfile.TemporaryDirectory() as folder, caches(case, folder), torch.set_grad_enabled(trained):
        _judge(case, target, rng, "inductor", place, "float", names)
