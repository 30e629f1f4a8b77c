"""Check that activations and their gradients take the same side of a number that 16 bits do not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from .value_error import LAYOUTS

ELSEWHERE = -7.0
# Numbers that neither type holds: some are rounded up and some down.
LIMITS = (0.1, 0.3, 0.7, 1.1, 3.14, 9.99)
STEPS = 3
# Enough that vectors of a processor are filled, with a rest.
TIMES = 5

Limited = Callable[[Tensor, float], Tensor]
# What each of them gives where its operand has no part in the result.
CONSTANT: dict[str, tuple[Limited, float]] = {
    "threshold": (lambda x, limit: F.threshold(x, limit, ELSEWHERE), ELSEWHERE),
    "threshold in place": (lambda x, limit: F.threshold(x.clone(), limit, ELSEWHERE, inplace=True), ELSEWHERE),
    "hardshrink": (F.hardshrink, 0.0),
    "softshrink": (F.softshrink, 0.0),
    "where": (lambda x, limit: torch.where(x > limit, x, ELSEWHERE), ELSEWHERE),
    "masked_fill": (lambda x, limit: x.masked_fill(x > limit, ELSEWHERE), ELSEWHERE),
}
BOUNDED: dict[str, Limited] = {
    "hardtanh": lambda x, limit: F.hardtanh(x, -limit, limit),
    "clamp": lambda x, limit: x.clamp(-limit, limit),
    "clamp by a maximum": lambda x, limit: x.clamp(max=limit),
    "clamp in place": lambda x, limit: x.clone().clamp_(min=-limit),
}


@contract("AMP-NUMERICS-133")
@pytest.mark.parametrize("layout", ["contiguous", "every second"])
@pytest.mark.parametrize("function", [*CONSTANT, *BOUNDED])
def test_sides_of_a_limit(case: Case, target: Target, amp_dtype: torch.dtype, function: str, layout: str) -> None:
    """Where an operand has no part in an element of the result, the element's gradient is 0; elsewhere it is 1."""
    for limit in LIMITS:
        x = LAYOUTS[layout](_around(limit, amp_dtype).to(target.device)).detach().requires_grad_()
        call = CONSTANT[function][0] if function in CONSTANT else BOUNDED[function]
        result = call(x, limit)
        gradient = torch.autograd.grad(result, x, torch.ones_like(result))[0].cpu()
        given, seen = x.detach().cpu(), result.detach().cpu()
        passes = seen != CONSTANT[function][1] if function in CONSTANT else seen == given
        # At a bound the operand and the bound are one number, and the gradient is either's.
        decided = torch.ones_like(passes) if function in CONSTANT else given.abs() != torch.tensor(limit).to(amp_dtype)
        wrong = (decided & (gradient != passes.to(amp_dtype))).nonzero().flatten()[:2].tolist()
        found = [f"{float(given[at]):g} gives {float(seen[at]):g}, gradient {float(gradient[at]):g}" for at in wrong]
        case.equal(f"{limit}: elements whose gradient is of the other side", found, [])


def _around(limit: float, dtype: torch.dtype) -> Tensor:
    """Return the number of the type that is nearest, its neighbours, and the same below zero."""
    steps = torch.arange(-STEPS, STEPS + 1)
    near = (torch.tensor([limit]).to(dtype).view(torch.int16) + steps.to(torch.int16)).view(dtype)
    return torch.cat([near, -near]).repeat(TIMES)
