"""Check the results and gradients of compiled functions at their bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .bounds import FUNCTIONS, SIDES, points
from .support import compiling, dtypes_of, unlike

Call: TypeAlias = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _agree(case: Case, target: Target, backend: str, dtype: torch.dtype) -> None:
    given = points(dtype, target.device)

    def call(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: {**FUNCTIONS, **SIDES}[name](leaf) for name, leaf in leaves.items()}

    nan = torch.full_like(given, torch.nan)
    with compiling(case, backend):
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        seen = _answers(compiled, (*FUNCTIONS, *SIDES), given)
        # Of what is no number the gradient is open. Programs without gradients are decomposed further.
        results = compiled(dict.fromkeys(FUNCTIONS, nan))
    expected = _answers(call, FUNCTIONS, given)
    of_nan = call(dict.fromkeys(FUNCTIONS, nan))
    for name in FUNCTIONS:
        wanted = {what: one for what, one in expected.items() if what.startswith(f"{name}: ")}
        case.equal(f"{name} in {dtype}: what is not as in eager", unlike(seen, wanted, _near), [])
        case.equal(f"{name} of NaN in {dtype}", unlike(results, {name: of_nan[name]}, _near), [])
    for name in SIDES:
        kept = seen[f"{name}: results"] == given
        torn = given[(given != 0) & (kept != (seen[f"{name}: gradients"] == 1))]
        case.equal(f"{name} in {dtype}: where the gradient is of the other side than the result", torn.tolist(), [])


def _answers(call: Call, names: Iterable[str], given: Tensor) -> dict[str, Tensor]:
    leaves = {name: given.clone().requires_grad_() for name in names}
    results = call(leaves)
    ones = [torch.ones_like(one) for one in results.values()]
    gradients = torch.autograd.grad(tuple(results.values()), tuple(leaves.values()), ones)
    return {
        **{f"{name}: results": one.detach() for name, one in results.items()},
        **{f"{name}: gradients": one for name, one in zip(leaves, gradients, strict=True)},
    }


def _near(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=2 * torch.finfo(theirs.dtype).eps, atol=0.0, equal_nan=True)


@contract("AMP-COMPILE-079")
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition"])
def test_bounds_of_decompositions(case: Case, target: Target, backend: str) -> None:
    for dtype in dtypes_of(case, target):
        _agree(case, target, backend, dtype)


@contract("AMP-COMPILE-079")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_bounds_of_inductor(case: Case, target: Target, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree(case, target, "inductor", dtype)
