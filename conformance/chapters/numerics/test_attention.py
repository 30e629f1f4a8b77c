"""Numerics of attention by backend: what its backward makes of logits far below zero."""

from __future__ import annotations

import functools

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from .bounds_attention import BACKENDS, MASKS, LowLogits, Problem, attempt, measured
from .op_error import Measured
from .test_bounds import keeps_subnormals
from .test_reductions import dtypes

# Lengths of half a tile of 128 more than whole ones. References take the square of the length and the size of a head.
QUICK = (LowLogits("boolean", 64, 64, 2), LowLogits("float", 64, 64))
STANDARD = (
    *(LowLogits(mask, 64, 64, group) for mask in MASKS for group in (1, 2)),
    *(LowLogits(mask, 192, 16) for mask in MASKS),
    LowLogits("float", 704, 16),
)
FULL = tuple(LowLogits(mask, length, 64, group) for mask in MASKS for length in (192, 704) for group in (1, 2))


@contract("AMP-NUMERICS-101")
@pytest.mark.parametrize(
    "low",
    [
        *(pytest.param(low, id=str(low)) for low in QUICK),
        *(deep("standard", low, id=str(low)) for low in STANDARD if low not in QUICK),
        *(deep("full", low, id=str(low)) for low in FULL),
    ],
)
def test_gradients_below_zero(case: Case, target: Target, rng: torch.Generator, low: LowLogits) -> None:
    ran: dict[str, list[Measured]] = {name: [] for name in BACKENDS}
    raised: dict[str, RuntimeError] = {}
    for dtype in dtypes(case, target):
        form = FORMATS[dtype]
        problem = Problem.draw(low, form, rng)
        case.at_most("control: largest logsumexp of a row", problem.logsumexp(), -900.0)
        flushes = dtype is torch.float16 and not keeps_subnormals(target, dtype)
        references = problem.references(form, form.smallest_normal if flushes else form.smallest)
        region = functools.partial(target.autocast, dtype)
        for name in BACKENDS:
            try:
                with full_precision(target.device_type):
                    tensors = attempt(problem, name, form, target.device, region)
            except RuntimeError as error:
                raised.setdefault(name, error)
            else:
                ran[name] += [] if tensors is None else measured(tensors, references, f"{name}, {form.name}", form)
    # A failure of one backend is told from one of all.
    case.note("backends that take these inputs", [name for name, found in ran.items() if found])
    if raised:
        case.note("backends that raise", sorted(raised))
        raise next(iter(raised.values()))
    case.true("a backend takes these inputs", any(ran.values()))
    wrong = {one.what: one.error for found in ran.values() for one in found if not one.error <= 1}
    case.equal("tensors out of bounds, and how many times the bound", wrong, {})
    for name, found in ran.items():
        if found:
            case.at_most(f"{name}: worst error of {len(found)} tensors", max(one.error for one in found), 1.0, "bounds")
