"""Check ops that compute with positions and counts beyond what their 16-bit type can count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .far_positions import FAMILIES, Far, answers

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
LARGEST_STEP = 4
"""Between neighbours of the largest results, those from 4 to 8, in the eps of the type."""
ATOMIC_STEPS = 32
"""As LARGEST_STEP, for gradients on accelerators, whose atomic additions round each of 16 partial sums.

The sums of a pixel go up to 12, and an element is in four pixels. A wrong place moves the gradient by a whole one.
"""
WEIGHTS = 2e-3
"""What the rounding of positions up to 5,000 in float32 moves a result that is interpolated between -4 and 4."""


@contract("AMP-NUMERICS-125")
@pytest.mark.parametrize("family", FAMILIES)
def test_far_positions(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    compared = 0
    for name, far in FAMILIES[family].items():
        with full_precision(target.device_type):
            plain, seen = (_answers(far, dtype, target.device) for dtype in (torch.float32, amp_dtype))
        if isinstance(seen, str) or isinstance(plain, str):
            case.note(f"{name}: {amp_dtype}", seen if isinstance(seen, str) else plain)
            continue
        compared += 1
        atomic = target.device_type != "cpu"
        wrong = [
            f"result or gradient {number}: {_first_difference(*both)}"
            for number, both in enumerate(zip(seen, plain, strict=True), 1)
            if not _alike(*both, far.interpolates, ATOMIC_STEPS if number > 1 and atomic else LARGEST_STEP)
        ]
        case.equal(f"{name}: differences from float32", wrong, [])
    case.enough(target, "calls compared", compared)


def _answers(far: Far, dtype: torch.dtype, device: torch.device) -> list[Tensor] | str:
    try:
        return answers(far, dtype, device)
    except RuntimeError as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:80]}"


def _alike(seen: Tensor, plain: Tensor, interpolates: bool, steps: int) -> bool:
    if seen.shape != plain.shape:
        return False
    exact = plain.to(seen.dtype)
    if not interpolates or not seen.is_floating_point():
        return torch.equal(seen, exact)
    bound = steps * torch.finfo(seen.dtype).eps + WEIGHTS
    return bool(((seen.float() - plain.float()).abs() <= bound).all())


def _first_difference(seen: Tensor, plain: Tensor) -> str:
    if seen.shape != plain.shape:
        return f"{list(seen.shape)}, in float32 {list(plain.shape)}"
    ours, theirs = seen.flatten().double(), plain.to(seen.dtype).flatten().double()
    place = int((ours - theirs).abs().nan_to_num(torch.inf).argmax())
    return f"{float(ours[place]):g} at {place}, in float32 {float(plain.flatten()[place]):g}"
