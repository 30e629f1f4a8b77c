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
    nan = torch.full_like(given, torch.nan)
    functions = {**FUNCTIONS, **SIDES}

    def call(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: functions[name](leaf) for name, leaf in leaves.items()}

    with compiling(case, backend):
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        results, gradients = _answers(compiled, functions, given)
        # Of what is no number the gradient is open. Programs without gradients are decomposed further.
        of_nan = compiled(dict.fromkeys(FUNCTIONS, nan))
    expected, derived = _answers(call, FUNCTIONS, given)
    for name, wanted in call(dict.fromkeys(FUNCTIONS, nan)).items():
        seen = {"results": results[name], "gradients": gradients[name]}
        unlike_eager = unlike(seen, {"results": expected[name], "gradients": derived[name]}, _near)
        case.equal(f"{name} in {dtype}: what is not as in eager", unlike_eager, [])
        case.equal(f"{name} of NaN in {dtype}", unlike(of_nan, {name: wanted}, _near), [])
    for name in SIDES:
        torn = given[(given != 0) & ((results[name] == given) != (gradients[name] == 1))]
        case.equal(f"{name} in {dtype}: where the gradient is of the other side than the result", torn.tolist(), [])


def _answers(call: Call, names: Iterable[str], given: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of a call and their gradients, by function."""
    leaves = {name: given.clone().requires_grad_() for name in names}
    results = call(leaves)
    ones = [torch.ones_like(one) for one in results.values()]
    gradients = torch.autograd.grad(tuple(results.values()), tuple(leaves.values()), ones)
    return {name: one.detach() for name, one in results.items()}, dict(zip(leaves, gradients, strict=True))


def _near(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=2 * torch.finfo(theirs.dtype).eps, atol=0.0, equal_nan=True)


@contract("AMP-COMPILE-079")
def test_bounds_of_decompositions(case: Case, target: Target) -> None:
    for dtype in dtypes_of(case, target):
        _agree(case, target, "aot_eager_decomp_partition", dtype)


@contract("AMP-COMPILE-079")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_bounds_of_inductor(case: Case, target: Target, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)
    _agree(case, target, "inductor", dtype)
