"""Check results and gradients at kinks, ties and poles in 16 bits against those in float32."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .special_points import FAMILIES, Point

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings of the type.
LIMIT = 4


@contract("AMP-NUMERICS-122")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["in", "outside"])
def test_special_points(case: Case, target: Target, amp_dtype: torch.dtype, place: str, family: str) -> None:
    """Operands are 16-bit outside of a region, and float32 in one; the numbers are exact in both."""
    compared, wrong = 0, {}
    for name, point in FAMILIES[family].items():
        with full_precision(target.device_type):
            plain = _answers(point, target.device, torch.float32, contextlib.nullcontext())
            if place == "in":
                seen = _answers(point, target.device, torch.float32, target.autocast(amp_dtype))
            else:
                seen = _answers(point, target.device, amp_dtype, contextlib.nullcontext())
        if isinstance(seen, str) or isinstance(plain, str):
            case.note(f"{name}: {amp_dtype} {place}", seen if isinstance(seen, str) else plain)
            continue
        compared += 1
        for what, (one, other) in enumerate(zip(seen, plain, strict=True)):
            if not _near(one, other, amp_dtype):
                label = f"gradient {what}" if what else "result"
                wrong[f"{name}, {label}"] = f"{_first(one)}, in float32 {_first(other)}"
    case.at_least("calls compared", compared, 1)
    case.equal("results and gradients that are not float32's", wrong, {})


def _answers(
    point: Point, device: torch.device, dtype: torch.dtype, region: contextlib.AbstractContextManager[object]
) -> list[Tensor] | str:
    """Return the result and its gradients, or what the call is refused with."""
    leaves = [_placed(operand, device, dtype).requires_grad_() for operand in point.operands]
    try:
        with region:
            result = point.call(*leaves)
        gradients: tuple[Tensor | None, ...] = ()
        if result.requires_grad and not point.picks:
            gradients = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0][:80]
    given = [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
    return [each.detach().to("cpu", torch.float32) for each in (result, *given)]


def _placed(operand: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy in this type whose NaNs keep their signs, which conversions may change and CUDA sorts by."""
    signs = torch.where(operand.signbit(), -1.0, 1.0).to(dtype)
    return operand.to(dtype).copysign(signs).to(device)


def _first(tensor: Tensor) -> list[float]:
    return [float(value) for value in tensor.flatten()[:8]]


def _near(seen: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    rounding, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return bool(torch.isclose(seen, exact, rtol=LIMIT * rounding, atol=least, equal_nan=True).all())
