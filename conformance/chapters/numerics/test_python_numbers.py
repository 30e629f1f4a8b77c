"""Check the arithmetic of 16-bit tensors and numbers that 16 bits do not hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, Format, rounded
from .op_error import half_spacing

pytestmark = pytest.mark.usefixtures("one_thread")
Call = Callable[[Any, Any, Any], Tensor]

OPERATORS: Mapping[str, Call] = {
    "t * n": lambda t, u, n: t * n,
    "n * t": lambda t, u, n: n * t,
    "t / n": lambda t, u, n: t / n,
    "t *= n": lambda t, u, n: operator.imul(t.clone(), n),
    "t /= n": lambda t, u, n: operator.itruediv(t.clone(), n),
    "torch.mul(t, n)": lambda t, u, n: torch.mul(t, n),
    "torch.div(t, n)": lambda t, u, n: torch.div(t, n),
    "t.mul_(n)": lambda t, u, n: t.clone().mul_(n),
    "t.div_(n)": lambda t, u, n: t.clone().div_(n),
    "n / t": lambda t, u, n: n / t,
    "t + n": lambda t, u, n: t + n,
    "n + t": lambda t, u, n: n + t,
    "t - n": lambda t, u, n: t - n,
    "n - t": lambda t, u, n: n - t,
    "t += n": lambda t, u, n: operator.iadd(t.clone(), n),
    "t -= n": lambda t, u, n: operator.isub(t.clone(), n),
    "torch.rsub(t, n)": lambda t, u, n: torch.rsub(t, n),
}
OF_NUMBERS_ALONE: Mapping[str, Call] = {
    "torch.lerp(t, u, n)": torch.lerp,
    "torch.addcmul(t, t, u, value=n)": lambda t, u, n: torch.addcmul(t, t, u, value=n),
    "torch.addcdiv(t, t, u, value=n)": lambda t, u, n: torch.addcdiv(t, t, u, value=n),
    "torch._foreach_mul([t], n)": lambda t, u, n: torch._foreach_mul([t], n)[0],
    "torch._foreach_div([t], n)": lambda t, u, n: torch._foreach_div([t], n)[0],
    "torch._foreach_add([t], n)": lambda t, u, n: torch._foreach_add([t], n)[0],
}
OPS = {**OPERATORS, **OF_NUMBERS_ALONE}
# A kernel may round a number that is added to the type of the tensor first, and a tensor in every op.
SUMS = {name for name in OPS if "+" in name or "-" in name or "sub" in name or "foreach_add" in name}
TWICE = {"n / t"}
"""Written as a product with the reciprocal, which is rounded too."""
NUMBERS = (0.1, 1 / 3, 3, -7, 1e-3, 100.1, 0.7, 2**-20, 60000.0, 1.2e5)
GIVEN_AS: Mapping[str, Callable[[float], Any]] = {
    "number": lambda n: n,
    "0-d float32 tensor": lambda n: torch.tensor(float(n)),
    "0-d float64 tensor": lambda n: torch.tensor(float(n), dtype=torch.float64),
}
FP32_ERROR = 2.0**-22
"""Of a few operations in float32, of the size of what they add up."""


def _added_up(name: str, t: Tensor, u: Tensor, n: float) -> Tensor:
    """Return the size of what a call adds up, whose digits may cancel; none of a product or quotient."""
    if name in SUMS:
        return t.abs() + abs(n)
    if "value" in name or "lerp" in name:
        return t.abs() * (1 + abs(n)) * (u if "addcmul" in name else 1 / u).clamp(min=1) + u
    return torch.zeros_like(t)


def _beyond(seen: Tensor, exact: Tensor, added_up: Tensor, roundings: int, form: Format) -> Tensor:
    """Return by how much results in the range of `form` are farther from the exact ones than so many roundings."""
    halves = half_spacing(exact.abs().clamp(min=form.smallest_normal), form) * (2 * roundings - 1)
    far = (seen - exact).abs().nan_to_num(math.inf) - halves * (1 + 2**-6) - FP32_ERROR * added_up
    return far.where(exact.abs() < form.largest * (1 - form.unit_roundoff), -math.inf)


def _off(name: str, t: Tensor, u: Tensor, number: float, given: str, device: torch.device) -> str:
    """Say which results of a call are farther off than its roundings; nothing where none is."""
    form = FORMATS[t.dtype]
    seen = OPS[name](t.to(device), u.to(device), GIVEN_AS[given](number)).cpu()
    if seen.dtype is not t.dtype:
        return f"a result of {seen.dtype}"
    exact = t.double(), u.double()
    numbers = [float(number)]
    if name in SUMS or given != "number":
        numbers.append(float(rounded(torch.tensor(number, dtype=torch.float64), form)))
    roundings = 2 if name in TWICE else 1
    beyond = torch.full(t.shape, math.inf, dtype=torch.float64)
    for one in numbers:
        far = _beyond(seen.double(), OPS[name](*exact, one), _added_up(name, *exact, one), roundings, form)
        beyond = torch.minimum(beyond, far)
    if not (off := int((beyond > 0).sum())):
        return ""
    place = int(beyond.argmax())
    return f"{off} of {len(t)}: t = {t[place].item()} gives {seen[place].item()}"


@contract("AMP-NUMERICS-149")
@pytest.mark.parametrize("given", GIVEN_AS)
def test_numbers_are_not_rounded(
    case: Case, target: Target, rng: torch.Generator, amp_dtype: torch.dtype, given: str
) -> None:
    if "float64" in given:
        case.require_arithmetic(target, torch.float64)
    many, small = torch.rand(999, generator=rng) * 20 + 0.01, torch.rand(99, generator=rng) * 1e-3 + 1e-5
    sizes = torch.cat([many, small, torch.tensor([1.2e-5])])
    signs = torch.randint(0, 2, sizes.shape, generator=rng) * 2 - 1
    t, u = (one.to(amp_dtype) for one in (sizes * signs, sizes.flip(0) + 0.25))
    for name in OPS if given == "number" else OPERATORS:
        numbers = [one for one in NUMBERS if "lerp" not in name or 0 < one < 1]
        wrong = {str(one): off for one in numbers if (off := _off(name, t, u, one, given, target.device))}
        case.equal(f"{name}, n a {given}: results that are farther off", wrong, {})
