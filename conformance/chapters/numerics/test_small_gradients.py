"""Check that float16 gradients keep what incoming gradients near the smallest numbers of the type bring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .value_ops import FUNCTIONS, OFF_CARDS, OPS, Call

HALF = FORMATS[torch.float16]
SCALE = 2.0**-14  # incoming gradients around the smallest normal number
# Compositions round a few times on the way, to the spacing of subnormal numbers each time. Zeros are 1024 spacings off.
SPACINGS = 16.0
ROUNDINGS = 4.0
# Their gradients are made of logarithms of the incoming ones, and of powers that leave the range.
OTHERWISE = ("logcumsumexp", "matrix_exp")
CALLS: dict[str, Call] = {
    **FUNCTIONS,
    **{name: op.call for name, op in OPS.items() if op.smooth and name not in OTHERWISE},
}


def _gradient(call: Call, x: Tensor, target: Target, scale: float, *, region: bool) -> Tensor:
    """Return in float64 the gradient of a call by `x`, for incoming gradients of one to two times `scale`."""
    leaf = x.to(target.device).requires_grad_()
    with target.autocast(torch.float16, enabled=region):
        output = call(leaf)
    incoming = ((1 + torch.arange(output.numel()) * 7 % 16 / 16) * scale).reshape(output.shape)
    return torch.autograd.grad(output, leaf, incoming.to(output.device, output.dtype))[0].cpu().double()


@contract("AMP-NUMERICS-141")
@pytest.mark.parametrize("place", ["in a region", "outside"])
def test_small_incoming_gradients(case: Case, target: Target, rng: torch.Generator, place: str) -> None:
    case.require(target, torch.float16)
    x = (torch.randn(8, 33, generator=rng).abs() + 0.2).to(torch.float16)
    wrong, judged = {}, 0
    for name, call in CALLS.items():
        if target.device_type != "cpu" and name in OFF_CARDS:
            continue
        try:
            small, large = (_gradient(call, x, target, scale, region=place == "in a region") for scale in (SCALE, 1.0))
        except (RuntimeError, NotImplementedError) as error:
            case.note(f"{name}: refused", str(error).splitlines()[0][:80])
            continue
        judged += 1
        expected = large * SCALE
        allowed = SPACINGS * HALF.smallest + ROUNDINGS * HALF.unit_roundoff * expected.abs()
        error_of_each = (small - expected).abs() / allowed
        if not float(error_of_each.nan_to_num(nan=float("inf")).max()) <= 1.0:
            at = int(error_of_each.argmax())
            wrong[name] = f"{float(small.flatten()[at]):.3g} in place of {float(expected.flatten()[at]):.3g}"
    case.equal("gradients that do not follow small incoming ones", wrong, {})
    case.enough(target, "ops with a float16 gradient", judged, len(CALLS) // 2)
