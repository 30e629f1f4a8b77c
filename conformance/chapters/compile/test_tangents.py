"""Check that compiled functions pass on the tangents of forward mode, or refuse tensors that have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .support import compiling, dtypes_of, unlike, whole_numbers

Program = Callable[[Tensor], Tensor]


def _region(dtype: torch.dtype) -> Program:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=dtype, cache_enabled=False):
            return x @ x

    return run


def _region_and_outside(dtype: torch.dtype) -> Program:
    def run(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=dtype, cache_enabled=False):
            y = x @ x
        return y.float() * x

    return run


# Of a matrix of small integers, whose products every type holds.
PROGRAMS: Mapping[str, Callable[[torch.dtype], Program]] = {
    "elementwise": lambda _: lambda x: x * x + x,
    "a product": lambda _: lambda x: x @ x,
    "a product in a region": _region,
    "a region, and float32 after it": _region_and_outside,
    "a sum": lambda _: lambda x: (x * x).sum(0),
}


def _told(call: Program, x: Tensor, tangent: Tensor) -> dict[str, Tensor]:
    """Return the result for a dual tensor, and its tangent where it has one."""
    with forward_ad.dual_level():
        primal, found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
        told = {"result": primal.detach().clone()}
        if found is not None:
            told["tangent"] = found.detach().clone()
    return told


def _after_a_plain_call(compiled: Program, x: Tensor, tangent: Tensor) -> dict[str, Tensor]:
    compiled(x)
    return _told(compiled, x, tangent)


def _of_a_leaf(compiled: Program, x: Tensor, tangent: Tensor) -> dict[str, Tensor]:
    return _told(compiled, x.clone().requires_grad_(), tangent)


def _jvp(compiled: Program, x: Tensor, tangent: Tensor) -> dict[str, Tensor]:
    result, found = torch.func.jvp(compiled, (x,), (tangent,))
    return {"result": result, "tangent": found}


WAYS: Mapping[str, Callable[[Program, Tensor, Tensor], dict[str, Tensor]]] = {
    "at the first call": _told,
    "after a call without a tangent": _after_a_plain_call,
    "of a tensor that requires a gradient": _of_a_leaf,
    "by torch.func.jvp": _jvp,
}


def _judge(case: Case, target: Target, rng: torch.Generator, way: str, backend: str) -> None:
    x, tangent = whole_numbers(rng, target), whole_numbers(rng, target)
    for dtype in dtypes_of(case, target):
        for name, made in PROGRAMS.items():
            run = made(dtype)
            expected = WAYS[way](run, x, tangent)
            case.true(f"{dtype}, {name}: eager has a tangent (control)", "tangent" in expected)
            with compiling(case, backend):
                torch._dynamo.reset()
                try:
                    seen = WAYS[way](torch.compile(run, backend=backend, fullgraph=True), x, tangent)
                except Exception as error:  # of several classes by version
                    case.note(f"{dtype}, {name}: refused", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
                    continue
            case.equal(f"{dtype}, {name}: what there is", sorted(seen), sorted(expected))
            if seen.keys() == expected.keys():
                case.equal(f"{dtype}, {name}: what is not as in eager", unlike(seen, expected), [])


@contract("AMP-COMPILE-102")
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", deep("standard", "aot_eager")])
@pytest.mark.parametrize("way", WAYS)
def test_tangents(case: Case, target: Target, rng: torch.Generator, way: str, backend: str) -> None:
    _judge(case, target, rng, way, backend)


@contract("AMP-COMPILE-102")
@needs("compiled kernels")
@pytest.mark.parametrize("way", [deep("standard", way) for way in WAYS])
def test_tangents_of_inductor(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    _judge(case, target, rng, way, "inductor")
