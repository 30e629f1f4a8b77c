"""Check products and convolutions of whole numbers at drawn sizes, and how far what is not finite spreads in them."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .drawn_sizes import SIZED
from .sized_calls import Judge, judged, spread, wrong_numbers

FAMILIES = pytest.mark.parametrize(
    "family", [deep("standard", name) if name == "conv_transpose3d" else name for name in SIZED]
)


@contract("AMP-NUMERICS-145")
@FAMILIES
def test_whole_numbers(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    count = case.samples(quick=16, standard=120, full=1200)
    _hold(case, target, amp_dtype, family, wrong_numbers, count, "sums of whole numbers that are wrong")


@contract("AMP-NUMERICS-146")
@FAMILIES
def test_spread(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    count = case.samples(quick=12, standard=80, full=800)
    _hold(case, target, amp_dtype, family, spread, count, "elements that one which is not finite changes, or does not")


def _hold(case: Case, target: Target, amp_dtype: torch.dtype, family: str, judge: Judge, count: int, said: str) -> None:
    calls = 0
    wrong: dict[str, dict[str, str]] = {}
    for one, found in judged(judge, family, case.seed, count, target.device, amp_dtype):
        calls += found is not None
        for what, how in (found or {}).items():
            wrong.setdefault(f"{one.kind}: {what}", {})[one.described()] = how
    case.enough(target, "calls judged", calls)
    for what, how_many in wrong.items():
        case.equal(f"{what}: {said}", how_many, {})
