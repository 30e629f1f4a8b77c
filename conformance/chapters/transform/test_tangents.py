"""Check the tangents of arithmetic with Python numbers, of tensors with and without dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...harness.check import Case, contract
from ...harness.targets import Target

OPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "t + n": lambda t: t + 1.5,
    "n + t": lambda t: 1.5 + t,
    "t - n": lambda t: t - 1.5,
    "n - t": lambda t: 1.5 - t,
    "t * n": lambda t: t * 2.5,
    "n * t": lambda t: 2.5 * t,
    "t * int": lambda t: t * 3,
    "t / n": lambda t: t / 4,
    "n / t": lambda t: 4 / t,
    "t ** n": lambda t: t**2,
    "t % n": lambda t: t % 8.0,
    "t *= n": lambda t: t.clone().mul_(2.5),
    "t += n": lambda t: t.clone().add_(1.5),
    "add of alpha": lambda t: torch.add(t, t, alpha=0.5),
    "addcmul of a value": lambda t: torch.addcmul(t, t, t, value=0.5),
    "lerp of a weight": lambda t: torch.lerp(t, torch.ones_like(t), 0.25),
    "clamp": lambda t: t.clamp(0.0, 9.0),
    "where": lambda t: torch.where(t > 0, t, 1.5),
    "t * tensor": lambda t: t * torch.tensor(2.5, device=t.device).to(t.dtype),
    "-t": lambda t: -t,
}


@contract("AMP-TRANSFORM-005")
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=["no-dimensions", "one-element", "matrix"])
def test_tangents_of_arithmetic_with_numbers(
    case: Case, target: Target, amp_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Such as a loss times a scale."""
    for given in (torch.float32, amp_dtype):
        for name, call in OPS.items():
            t = torch.full(shape, 2.0, device=target.device, dtype=given)
            wide = t.cpu().double()
            exact = torch.func.jvp(call, (wide,), (torch.ones_like(wide),))[1]
            with target.autocast(amp_dtype), forward_ad.dual_level():
                primal, seen = forward_ad.unpack_dual(call(forward_ad.make_dual(t, torch.ones_like(t))))
                seen = torch.zeros_like(primal) if seen is None else seen
            with target.autocast(amp_dtype):
                _, by_jvp = torch.func.jvp(call, (t,), (torch.ones_like(t),))
            for how, one in (("dual numbers", seen), ("jvp", by_jvp)):
                case.equal(f"{name}, {given}: type of the tangent by {how}", one.dtype, primal.dtype)
                case.equal(f"{name}, {given}: tangent by {how}", one.tolist(), exact.tolist())
