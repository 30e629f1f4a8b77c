"""Numerics of attention by backend: what its backward makes of logits far below zero."""

from __future__ import annotations

import functools

import pytest
import torch

from conformance.harness.check import Case, contract, deep
from conformance.harness.targets import Target
from conformance.measure.precision import full_precision
from conformance.oracles.bounded import Measured
from conformance.oracles.bounded_attention import MASKS, LowLogits, Problem, attempts, measured
from conformance.oracles.float_formats import FORMATS
from conformance.test_numerics_bounds import keeps_subnormals
from conformance.test_numerics_reductions import dtypes

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
    ran: dict[str, list[Measured]] = {}
    for dtype in dtypes(case, target):
        form = FORMATS[dtype]
        problem = Problem.draw(low, form, rng)
        case.at_most("control: largest logsumexp of a row", problem.logsumexp(), -900.0)
        flushes = dtype is torch.float16 and not keeps_subnormals(target, dtype)
        references = problem.references(form, form.smallest_normal if flushes else form.smallest)
        with full_precision(target.device_type):
            for name, tensors in attempts(problem, form, target.device, functools.partial(target.autocast, dtype)):
                found = None if tensors is None else measured(tensors, references, f"{name}, {form.name}", form)
                ran.setdefault(name, []).extend(found or [])
    declined = [name for name, found in ran.items() if not found]
    case.note("backends that decline these inputs", declined)
    case.true("a backend takes these inputs", len(declined) < len(ran))
    wrong = {one.what: one.error for found in ran.values() for one in found if not one.error <= 1}
    case.equal("tensors out of bounds, and how many times the bound", wrong, {})
    for name, found in ran.items():
        if found:
            case.at_most(f"{name}: worst error of {len(found)} tensors", max(one.error for one in found), 1.0, "bounds")
