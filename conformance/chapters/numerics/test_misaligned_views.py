"""Check operations on unaligned 16-bit views."""

from __future__ import annotations

import functools

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .misaligned_views import OPERATIONS, PLACEMENTS
from .support import slug


@contract("AMP-NUMERICS-105")
@pytest.mark.parametrize("name", [pytest.param(name, id=slug(name)) for name in OPERATIONS])
def test_misaligned_views(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str) -> None:
    operation = OPERATIONS[name]
    operands = operation.draw(rng)
    with torch.no_grad():
        seed = torch.randint(-1, 2, operation.formula(*operands).shape, generator=rng).float()
    right = operation.expected(operands, seed)
    sources = [operand.to(target.device, amp_dtype) for operand in operands]
    names = ("result", *(f"gradient {place}" for place in range(len(operands))))
    for placement, place in PLACEMENTS.items():
        with full_precision(target.device_type):
            region = functools.partial(target.autocast, amp_dtype)
            seen = operation.measure(sources, seed.to(target.device), region, place)
        for what, tensor, expected in zip(names, seen, right, strict=True):
            case.equal(f"{name}, {placement}: dtype of the {what}", tensor.dtype, amp_dtype)
            # A zero may have either sign.
            case.identical(f"{name}, {placement}: {what}", tensor.cpu().double() + 0.0, expected + 0.0)
