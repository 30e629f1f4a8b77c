"""Check that sparse tensors have the products and sums of the dense ones of the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .sparse_calls import CALLS, LAYOUTS, Call, matrices

pytestmark = pytest.mark.filterwarnings("ignore")  # that some layouts are in beta


@contract("AMP-NUMERICS-132")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "_"))
def test_sparse_tensors(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str) -> None:
    """In regions of float32 numbers and outside of them of 16-bit ones, where the device has a kernel."""
    given = matrices(rng)
    try:
        LAYOUTS[layout](given[0].to(target.device)).to_dense()
    except RuntimeError as error:
        if target.device_type == "cpu":
            raise
        case.unsupported(f"{target.name} has no {layout}: {error}")
    exact = {name: _seen(call, *given, contextlib.nullcontext) for name, call in CALLS.items()}
    compared, wrong = 0, {}
    for place in ("in a region", "outside"):
        region = partial(target.autocast, amp_dtype) if place == "in a region" else contextlib.nullcontext
        dtype = torch.float32 if place == "in a region" else amp_dtype
        x, y = (one.to(target.device, dtype) for one in given)
        for name, call in CALLS.items():
            try:
                with full_precision(target.device_type):
                    seen = _seen(call, LAYOUTS[layout](x), y, region)
            except RuntimeError as error:
                case.note(f"{name} {place}", str(error).splitlines()[0][:80])
                continue
            compared += 1
            for what, right in exact[name].items():
                found = seen[what]
                if found.shape != right.shape or not torch.equal(found.cpu().float() + 0, right + 0):
                    wrong[f"{name} {place}: {what}"] = found.flatten()[:4].tolist()
    case.equal("results that are not those of dense tensors", wrong, {})
    case.enough(target, "calls compared", compared, 4)


def _seen(call: Call, x: Tensor, y: Tensor, region: Callable[[], AbstractContextManager[object]]) -> dict[str, Tensor]:
    """Return the result, dense, and the gradient of the dense operand where there is one."""
    leaf = y.detach().requires_grad_()
    with region():
        result = call(x, leaf)
    dense = result.to_dense() if result.layout is not torch.strided else result
    found = {"result": dense.detach()}
    if dense.requires_grad:
        steps = (torch.arange(dense.numel()) % 3 - 1).reshape(dense.shape)
        (found["gradient"],) = torch.autograd.grad(dense, leaf, steps.to(dense.device, dense.dtype))
    return found
