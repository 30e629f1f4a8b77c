"""Check conversions and copies of single tensors in a region and outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, narrow, tensor_of
from .tensor_conversions import LAYOUTS, differences, numbers


def _nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest, ties to even, in integer arithmetic; to float32 it is exact."""
    exact = x.to(torch.float64) if x.dtype is not dtype else x
    if dtype in (x.dtype, torch.float32):
        return exact.to(dtype)
    patterns = exact.to(torch.float32).contiguous().view(torch.int32).flatten().tolist()
    return tensor_of((narrow(one & 0xFFFF_FFFF, FORMATS[dtype]) for one in patterns), FORMATS[dtype]).reshape(x.shape)


@contract("AMP-REGION-115")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "_"))
def test_conversions(case: Case, target: Target, amp_dtype: torch.dtype, layout: str) -> None:
    regions: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "outside": contextlib.nullcontext,
        "in a region": partial(target.autocast, amp_dtype),
    }
    for given in (torch.float32, amp_dtype):
        found = {}
        for (name, region), sign in zip(regions.items(), (1, -1), strict=True):
            # Of the other sign in a region: what a copy outside has left behind is wrong there.
            host = LAYOUTS[layout](_nearest(sign * numbers(), given))
            with region():
                seen = list(differences(host, target.device, amp_dtype, _nearest, target.computes_in))
            found[name] = {what: (wrong, left) for what, wrong, left in seen}
            wrongs = {what: wrong for what, wrong, _ in seen if wrong}
            case.equal(f"{name}, of {given}: what is not as it should be", wrongs, {})
            case.at_least(f"{name}, of {given}: results", len(seen), 20)
        other = {what: one for what, one in found["in a region"].items() if one != found["outside"][what]}
        case.equal(f"of {given}: what differs from the call outside", other, {})
