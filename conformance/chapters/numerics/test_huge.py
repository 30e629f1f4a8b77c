"""Check operations on tensors of more than 2^31 elements."""

from __future__ import annotations

import functools

import pytest
import torch

from ...harness.check import Case, alone, contract, deep
from ...harness.targets import Target
from ...measure.allocator import available_bytes
from ...measure.precision import full_precision
from .huge_tensors import LIMIT, OPERATIONS, Operation, Setting
from .support import slug

ROOM = 2 << 30
"""Bytes for the pieces in which operands are filled and results compared, and for workspaces."""


def _ask_for_memory(case: Case, target: Target, operation: Operation, limit: int) -> None:
    """End the case where there is too little memory."""
    free, needed = available_bytes(target.device), operation.width * limit + ROOM
    if free is None:
        case.untestable(f"{target.name} does not tell how much memory is free; {needed / 2**30:.0f} GiB are needed")
        return
    if free < needed:
        case.untestable(f"{needed / 2**30:.1f} GiB of free memory are needed, {free / 2**30:.1f} are there")


@contract("AMP-NUMERICS-102")
@alone
@pytest.mark.parametrize("name", [deep("full", name, id=slug(name)) for name in OPERATIONS])
def test_many_elements(case: Case, target: Target, name: str) -> None:
    judge(case, target, name, LIMIT)


def judge(case: Case, target: Target, name: str, limit: int) -> None:
    """Hold one operation on tensors of more than `limit` elements to its numbers."""
    operation, found = OPERATIONS[name], case.supported(target)
    _ask_for_memory(case, target, operation, limit)
    # One type each: what is asked is where elements are found, in whatever type.
    dtype = found[list(OPERATIONS).index(name) % len(found)]
    setting = Setting(target.device, dtype, functools.partial(target.autocast, dtype), limit)
    try:
        with full_precision(target.device_type):
            for what, wrong in operation.run(setting):
                case.equal(f"{name}, {str(dtype).removeprefix('torch.')}: wrong {what}", wrong, 0)
    finally:
        if target.device_type != "cpu":
            torch.get_device_module(target.device).empty_cache()
