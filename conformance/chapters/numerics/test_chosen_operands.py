"""Check that the gradient goes to that of two operands whose number was returned."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

Choice = Callable[[Tensor, Tensor], Tensor]

CHOICES: dict[str, Choice] = {
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "max": torch.max,
    "min": torch.min,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "clamp-from-below": lambda x, y: x.clamp(min=y),
    "clamp-from-above": lambda x, y: x.clamp(max=y),
    "where-greater": lambda x, y: torch.where(x > y, x, y),
    "where-no-number": lambda x, y: torch.where(x.isnan(), y, x),
}
NUMBERS = (math.nan, -math.inf, -2.0, -0.0, 0.0, 1.0, 3.0, math.inf)
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
    "one element": lambda x: x,
}


def _gradients(call: Choice, x: Tensor, y: Tensor, incoming: Tensor, layout: str) -> list[Tensor]:
    """Return the result and both gradients on the CPU in float64; of one element, from calls of single elements."""
    if layout == "one element":
        parts = [_gradients(call, *each, layout="contiguous") for each in zip(x, y, incoming, strict=True)]
        return [torch.stack(each) for each in zip(*parts, strict=True)]
    leaves = [PLACES[layout](operand.detach().clone()).requires_grad_() for operand in (x, y)]
    result = call(*leaves)
    slopes = torch.autograd.grad(result, leaves, incoming.to(result.dtype))
    return [each.detach().to("cpu", torch.float64) for each in (result, *slopes)]


@contract("AMP-NUMERICS-140")
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_a_choice(case: Case, target: Target, rng: torch.Generator, choice: str) -> None:
    call = CHOICES[choice]
    pairs = torch.tensor([*itertools.product(NUMBERS, NUMBERS)], dtype=torch.float64)
    x, y = pairs[torch.randperm(len(pairs), generator=rng)].T
    # Halves of these are exact in 16 bits, and tell one element from another.
    incoming = 2.0 ** torch.randint(-3, 4, x.shape, generator=rng).double()
    chosen = call(x, y)
    number = ~chosen.isnan()
    first, second = (number & (chosen == operand) & (x != y) for operand in (x, y))
    tied = number & (x == y)
    wrong: dict[str, list[str]] = {}
    dtypes = (torch.float32, *case.supported(target))
    places = [*PLACES][:2] if case.level == "quick" else [*PLACES]
    for dtype, layout, inside in itertools.product(dtypes, places, (False, True)):
        if inside and (dtype != torch.float32 or layout == "one element"):
            continue
        region = target.autocast(case.supported(target)[0]) if inside else contextlib.nullcontext()
        with region:
            left, right, slope = (each.to(target.device, dtype) for each in (x, y, incoming))
            result, of_first, of_second = _gradients(call, left, right, slope, layout)
        unlike = {
            "result": number & (result != chosen),
            "gradient of the operand that is returned": (first & (of_first != incoming))
            | (second & (of_second != incoming)),
            "gradient of the other operand": (first & (of_second != 0)) | (second & (of_first != 0)),
            "sum of the gradients of equal operands": tied & (of_first + of_second != incoming),
        }
        for what, mask in unlike.items():
            for n in mask.nonzero().flatten()[:2].tolist():
                numbers = [each[n].item() for each in (x, y, incoming, result, of_first, of_second)]
                where = f"{dtype}, {layout}, {'in a region' if inside else 'outside'}"
                wrong.setdefault(what, []).append(f"{where}: {numbers}")
    for what in unlike:
        case.equal(f"{what}: x, y, incoming, result and both gradients", wrong.get(what, [])[:4], [])
    case.at_least("pairs of which one number is returned", int((first | second).sum()), 32)
