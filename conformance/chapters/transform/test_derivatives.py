"""Check derivatives of exact programs by every transform, with the region around it and inside the function."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .derivative_ways import FIRST, SECOND, Way, basis
from .derivatives import PLACES, direction_of, fault_of
from .exact_programs import BY_NAME, PROGRAMS, TAIL

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
# At quick: a loss, a bias, a convolution and a term that stays float32. At standard ways that are not slow take four
# more, which the seed chooses. Second derivatives take some below full.
_TWICE = tuple(one.name for one in PROGRAMS if not one.kept)
_FEW = ("linear-bias", "conv1d", "mlp", "float32-term")
_SOME = ("linear-bias", "conv1d", "mlp", "attention", "baddbmm", "conv2d-bias")
_QUICK = (
    *("backward", "grad", "vjp", "jacrev", "is_grads_batched", "functional.vjp", "dual-numbers", "grad-of-grad"),
    *("grad-no_grad", "grad-low", "vjp-aux", "jvp-aux", "jacrev-chunks", "functional.jacobian-forward"),
)


def _parameters(ways: Sequence[Way]) -> list[Any]:
    return [
        pytest.param(one, id=one.name) if one.name in _QUICK else deep("standard", one, id=one.name) for one in ways
    ]


def _outside(way: Way, name: str, target: Target) -> None:
    program = BY_NAME[name]
    way.take(program.function, program.inputs(target.device), direction_of(program, target.device))


def _check(case: Case, target: Target, way: Way, place: str, names: Sequence[str]) -> None:
    """Take one derivative of these programs: in one amp dtype each, by turns, and in all at the full level."""
    dtypes = case.supported(target)
    if case.level != "full":
        few = tuple(name for name in _FEW if name in names)
        others = [name for name in names if name not in few]
        more = 0 if case.level == "quick" or way.slow else min(4, len(others))
        names = (*few, *random.Random(f"{case.seed} {way.name} {place}").sample(others, more))
    names = case.with_kernels(target, {name: functools.partial(_outside, way, name, target) for name in names})
    found = {}
    for number, name in enumerate(names, start=tuple(PLACES).index(place)):
        for dtype in dtypes if case.level == "full" else (dtypes[number % len(dtypes)],):
            fault = fault_of(way, place, BY_NAME[name], functools.partial(target.autocast, dtype), dtype, target.device)
            if fault is not None:
                found[f"{name}, {dtype}"] = fault
    case.equal(f"programs whose {way.gives} by {way.name}, region {place}, differs from the exact one", found, {})


@contract("AMP-TRANSFORM-001")
@pytest.mark.parametrize("place", ["around", "inside", deep("full", "both")])
@pytest.mark.parametrize("way", _parameters(FIRST))
def test_first_derivatives(case: Case, target: Target, way: Way, place: str) -> None:
    _check(case, target, way, place, tuple(BY_NAME))


@contract("AMP-TRANSFORM-001")
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("way", _parameters([one for one in FIRST if one.gives == "jacobian" and not one.forward]))
def test_jacobians_behind_a_cast(case: Case, target: Target, way: Way, place: str) -> None:
    """A factor of float32 in front of a 16-bit product: 16-bit gradients come in, the last ones are float32."""

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm((1.0 + TAIL) * x, weight)

    for dtype in case.supported(target):
        inputs = BY_NAME["mm"].inputs(target.device)
        function, outer = PLACES[place](scaled, functools.partial(target.autocast, dtype))
        direction = direction_of(BY_NAME["mm"], target.device)
        with outer():
            leaves = tuple(one.detach().requires_grad_() for one in inputs)
            output = function(*leaves)
            rows = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in basis(output)]
            seen = way.take(function, inputs, direction)
        for number, (one, given) in enumerate(zip(seen, inputs, strict=True)):
            ours, expected = one.reshape(-1, *given.shape), torch.stack([row[number] for row in rows])
            case.identical(f"{dtype}: rows of input {number} against backward of each", ours, expected)


@contract("AMP-TRANSFORM-002")
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("way", _parameters(SECOND))
def test_second_derivatives(case: Case, target: Target, way: Way, place: str) -> None:
    _check(case, target, way, place, _TWICE if case.level == "full" else _SOME)
