"""Check products and convolutions of whole numbers at drawn sizes, and how far what is not finite spreads in them."""

from __future__ import annotations

import math

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from .drawn_sizes import PRODUCTS, SIZED
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


@contract("AMP-NUMERICS-146")
@pytest.mark.parametrize("op", [name for name, (_, _, added) in PRODUCTS.items() if added is None])
def test_sums_of_infinities(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    """A sum of infinities of one sign is infinite, whichever of its terms are."""
    call, several, _ = PRODUCTS[op]
    lead = (3,) if several else ()
    wrong: dict[str, list[float]] = {}
    for terms in (2, 5, 8, 16, 17, 33, 64):
        for infinity in (math.inf, -math.inf):
            left = torch.ones(*lead, 17, terms)
            left[..., 8, :] = infinity
            left[..., 3, ::2] = infinity
            with full_precision(target.device_type), target.autocast(amp_dtype):
                found = call(left.to(target.device), torch.ones(*lead, terms, 8, device=target.device))
            rows = found[..., (3, 8), :].float().flatten().unique().tolist()
            if rows != [infinity]:
                wrong[f"{terms} terms, {infinity}"] = rows
    case.equal(f"{op}: sums of infinities of one sign", wrong, {})


def _hold(case: Case, target: Target, amp_dtype: torch.dtype, family: str, judge: Judge, count: int, said: str) -> None:
    calls = 0
    wrong: dict[str, dict[str, str]] = {}
    for kind, sizes, found in judged(judge, family, case.seed, count, target.device, amp_dtype):
        calls += found is not None
        for what, how in (found or {}).items():
            wrong.setdefault(f"{kind}: {what}", {})[sizes] = how
    case.enough(target, "calls judged", calls)
    for what, calls_of_it in wrong.items():
        case.equal(f"{what}: {said}", calls_of_it, {})
