"""Check that a compiled program has the second derivatives of eager, or that the compiler refuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.numbers.formats import FORMATS
from .support import compiling, dtypes_of

ROUNDINGS = 64
"""That two ways to the same second derivative may be apart, normwise: they pass through 16 bits in another order."""


def _penalty_inside(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).tanh().float().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return y + gradient.float().square().sum()


# A backward needs what forward made (exp, sigmoid), what it was given (cube), or casts of that (a product).
PROGRAMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "exp": lambda x, w: x.exp().tanh(),
    "sigmoid": lambda x, w: x.sigmoid(),
    "cube": lambda x, w: x**3,
    "product-then-tanh": lambda x, w: (x @ w).tanh(),
    "weight-twice": lambda x, w: F.linear(F.linear(x, w).tanh(), w),
    "exp-of-the-weight": lambda x, w: x * w.exp(),
    "softmax": lambda x, w: x.softmax(-1) @ w,
    "normalization": lambda x, w: F.layer_norm(x, (4,)).tanh() @ w,
    "penalty-inside": _penalty_inside,
}
AT_QUICK = ("product", "exp", "cube")


@contract("AMP-COMPILE-097")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager"), deep("full", "inductor")])
@pytest.mark.parametrize("name", [one if one in AT_QUICK else deep("standard", one) for one in PROGRAMS])
def test_second_derivatives(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    x, w = (torch.randn((4, 4), generator=rng).to(target.device) for _ in range(2))
    program = PROGRAMS[name]
    with compiling(case, backend):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            expected = _penalized(target, dtype, program, x, w) or {}
            case.true(f"{dtype}: eager has a second derivative (control)", bool(expected), list(expected))
            seen = _penalized(target, dtype, torch.compile(program, backend=backend), x, w)
            if seen is None:
                case.note(f"{dtype}: the compiler", "refuses second derivatives")
                continue
            case.equal(f"{dtype}: what the penalty of the gradient has a gradient for", list(seen), list(expected))
            for what in [one for one in expected if one in seen]:
                far = normwise_distance(seen[what], expected[what])
                case.at_most(f"{dtype}: {what}", far, ROUNDINGS * FORMATS[dtype].unit_roundoff, "normwise")


def _penalized(
    target: Target, dtype: torch.dtype, program: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor
) -> dict[str, Tensor] | None:
    """Return the gradients of a penalty of the gradient; None where taking them is refused."""
    leaves = {"input": x.clone().requires_grad_(), "weight": w.clone().requires_grad_()}
    with target.autocast(dtype):
        result = program(*leaves.values())
    try:
        first = torch.autograd.grad(result.float().sum(), list(leaves.values()), create_graph=True, allow_unused=True)
        penalty = torch.stack([one.float().square().sum() for one in first if one is not None]).sum()
        if not penalty.requires_grad:
            return {}
        penalty.backward()
    except RuntimeError as error:
        if "backward" not in str(error):
            raise
        return None
    return {what: one.grad for what, one in leaves.items() if one.grad is not None}
