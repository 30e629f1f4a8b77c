"""Check losses at the limits of their options, in a region, and in 16 bits or float32 outside of one."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.judge import lacks_kernel, lacks_kernel_of_dtype
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .limits import LIMITS, REFUSED

PLACES = ("region", "16 bits", "float32")
ROUNDINGS = 8
"""Of results, and of the logits and variances that they are made of."""


def _place(
    place: str, target: Target, dtype: torch.dtype
) -> tuple[contextlib.AbstractContextManager[object], torch.dtype]:
    if place == "region":
        return target.autocast(dtype), torch.float32
    return contextlib.nullcontext(), dtype if place == "16 bits" else torch.float32


@contract("AMP-LOSS-023")
@pytest.mark.parametrize("place", PLACES)
def test_losses_at_their_limits(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    judged = 0
    for name, limit in LIMITS.items():
        region, dtype = _place(place, target, amp_dtype)
        operands = [torch.tensor(one, device=target.device, dtype=dtype) for one in limit.operands]
        operands[0].requires_grad_()
        try:
            with region:
                seen = limit.call(*operands)
        except (ValueError, TypeError, AttributeError) as error:
            case.equal(f"{name}: what it raises", f"{type(error).__name__}: {error}", None)
            continue
        except RuntimeError as error:
            of_type = place == "16 bits" and lacks_kernel_of_dtype(error)
            if not (of_type or lacks_kernel(error)):
                raise
            case.note(f"{name}: no kernel for {dtype}", str(error).splitlines()[0][:80])
            continue
        judged += 1
        unit = FORMATS[amp_dtype].unit_roundoff if place != "float32" else 2.0**-24
        near = partial(torch.allclose, rtol=ROUNDINGS * unit, atol=ROUNDINGS * unit)
        wanted = torch.tensor(limit.results, dtype=torch.float64)
        found = seen.detach().cpu().double()
        case.equal(f"{name}: shape", found.shape, wanted.shape)
        case.true(f"{name}: {found.tolist()}, promised {wanted.tolist()}", near(found, wanted))
        if not wanted.isfinite().all():
            continue  # of an infinite loss no gradient is promised
        (gradient,) = torch.autograd.grad(seen.sum(), operands[0])
        slopes = gradient.cpu().double()
        case.true(f"{name}: gradients {slopes.tolist()} are finite", bool(slopes.isfinite().all()))
        if limit.gradients is not None:
            right = torch.tensor(limit.gradients, dtype=torch.float64)
            case.true(f"{name}: gradients {slopes.tolist()}, promised {right.tolist()}", near(slopes, right))
    case.at_least("losses (control)", judged, len(LIMITS) // 2)


@contract("AMP-LOSS-023")
@pytest.mark.parametrize("place", PLACES)
def test_options_beyond_their_limits(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    taken = []
    for name, (call, numbers) in REFUSED.items():
        region, dtype = _place(place, target, amp_dtype)
        operands = [torch.tensor(one, device=target.device, dtype=dtype) for one in numbers]
        try:
            with region:
                taken.append(f"{name}: {call(*operands).tolist()}")
        except (RuntimeError, ValueError):
            pass
    case.equal("losses that are given for what the documentation excludes", taken, [])
