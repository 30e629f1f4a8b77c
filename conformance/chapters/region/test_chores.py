"""Check that what programs do around their passes is in a region what it is outside."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .chores import CHORES, Region


def _differing(chore: str, device: torch.device, region: Region) -> tuple[int, dict[str, str]]:
    """Return how many tensors the chore left, and what is wrong with each that is not as it should be."""
    found: dict[str, str] = {}
    count = 0
    for name, seen, wanted in CHORES[chore](device, region):
        count += 1
        if seen is None or wanted is None:
            found[name] = "missing" if seen is None else "too many"
        elif (seen.dtype, seen.shape, seen.device) != (wanted.dtype, wanted.shape, wanted.device):
            found[name] = f"{seen.dtype}, {tuple(seen.shape)}"
        elif not torch.equal(seen, wanted):
            found[name] = "other values"
    return count, found


@contract("AMP-REGION-114")
@pytest.mark.parametrize("chore", CHORES, ids=lambda name: name.replace(" ", "_"))
def test_chores(case: Case, target: Target, amp_dtype: torch.dtype, chore: str) -> None:
    if chore == "deepcopy" and (reason := target.lacks("plain tensors")):
        case.unsupported(f"copy.deepcopy keeps gradients, without autocast too: {reason}")
    case.require_call(target, f"do this: {chore}", lambda: _differing(chore, target.device, contextlib.nullcontext))
    regions: dict[str, Region] = {
        "outside": contextlib.nullcontext,
        "in a region": partial(target.autocast, amp_dtype),
    }
    for name, region in regions.items():
        count, wrong = _differing(chore, target.device, region)
        case.at_least(f"{name}: tensors", count, 2)
        case.equal(f"{name}: what is not as it should be", wrong, {})
