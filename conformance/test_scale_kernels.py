"""Loss scaling: the kernels under GradScaler by themselves, bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from conformance.harness.check import Case, contract, deep
from conformance.harness.targets import Target
from conformance.oracles import grad_scaler as oracle
from conformance.test_scale import FORMS, as_gradient, as_tensor, require

KERNEL_GRADIENTS = {
    "ordinary": [1.0, -2.5, 1024.0, 3.0],
    "finite-extremes": [0.0, -0.0, 2.0**-20, 60000.0],
    "inf": [1.0, math.inf, 2.0],
    "minus-inf": [-math.inf],
    "nan": [4.0] * 40 + [math.nan],
    "long": [float(k % 251) - 125.0 for k in range(1023)],
}
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=["fp32", "bf16", "fp16", "fp64"]
)


@contract("AMP-SCALE-140")
@DTYPES
@pytest.mark.parametrize(
    "factor",
    [2.0**-16, 1.0, 1 / 3, deep("standard", 3.0), deep("standard", 2.0**-30)],
    ids="{:g}".format,
)
def test_check_and_unscale(case: Case, target: Target, dtype: torch.dtype, factor: float) -> None:
    require(case, target, dtype)
    factor = oracle.rounded(factor, oracle.FP32)
    for name, values in KERNEL_GRADIENTS.items():
        numbers = torch.tensor(values, dtype=dtype)
        gradients = [numbers.to(target.device, copy=True), torch.ones(3, dtype=dtype, device=target.device)]
        flag = torch.zeros((), device=target.device)
        inverse = torch.tensor(factor, device=target.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
        after, found = oracle.check_and_unscale([as_gradient(numbers)], 0.0, factor)
        case.identical(f"{name}: gradients", gradients[0], as_tensor(after[0], numbers))
        case.equal(f"{name}: flag", flag.item(), found)
        case.identical(f"{name}: the factor", inverse, torch.tensor(factor))


@contract("AMP-SCALE-141")
@DTYPES
@pytest.mark.parametrize("before", [0.0, 1.0], ids=["clear", "set"])
def test_flag(case: Case, target: Target, dtype: torch.dtype, before: float) -> None:
    require(case, target, dtype)
    inverse = torch.tensor(0.5, device=target.device)
    largest = FORMS[dtype].largest
    for value, found in ((largest, before), (-largest, before), (math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0)):
        for place in (0, 20, 40):
            gradient = torch.ones(41, dtype=dtype, device=target.device)
            gradient[place] = value
            flag = torch.tensor(before, device=target.device)
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
            case.equal(f"flag for {value} at {place}", flag.item(), found)
    flag = torch.tensor(before, device=target.device)
    torch._amp_foreach_non_finite_check_and_unscale_([], flag, inverse)
    case.equal("flag for no gradient", flag.item(), before)


@contract("AMP-SCALE-142")
@pytest.mark.parametrize(
    "scale", [65536.0, 3.0, 2.0**127, oracle.FP32.largest, oracle.FP32.smallest], ids="{:g}".format
)
def test_update_scale(case: Case, target: Target, scale: float) -> None:
    require(case, target, torch.float64)  # the factors are doubles
    growths = (2.0, 1.5, 1.1) if case.level == "quick" else (2.0, 1.5, 1.1, 1 + 2**-30, 1e30)
    counts = ((0, 1), (0, 2), (1, 2), (1998, 2000), (1999, 2000))
    wrong = []
    arguments = list(itertools.product(growths, (0.5, 0.9, 0.1), counts, (0.0, 1.0, 2.0)))
    for growth, backoff, (count, interval), found in arguments:
        tensor = torch.tensor(scale, device=target.device)
        steps = torch.tensor(count, dtype=torch.int32, device=target.device)
        flag = torch.tensor(found, device=target.device)
        answer = torch._amp_update_scale_(tensor, steps, flag, growth, backoff, interval)
        seen = (tensor.item(), steps.item(), flag.item(), answer.data_ptr() == tensor.data_ptr())
        expected = (*oracle.update_scale(scale, count, found, growth, backoff, interval), found, True)
        if seen != expected:
            wrong.append(
                f"growth {growth}, backoff {backoff}, count {count} of {interval}, found {found}: "
                f"scale, tracker, flag, in place {seen}, expected {expected}"
            )
    case.note("updates compared", len(arguments))
    case.equal("updates that differ from the model", wrong, [])
