"""Check the arithmetic of a training step: master weights, scaling, unscaling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, FP32, Format, tensor_of
from .support import leaves_on


@contract("AMP-NUMERICS-026")
@pytest.mark.parametrize("share", [4, deep("standard", 16)])
def test_master_weights_keep_small_updates(case: Case, target: Target, amp_dtype: torch.dtype, share: int) -> None:
    # A fraction of half the spacing of a 16-bit weight of 1: that weight never moves, however often it is updated.
    update = FORMATS[amp_dtype].unit_roundoff / share
    ones = torch.ones(3, 5, device=target.device)
    moved = {}
    for dtype in (torch.float32, amp_dtype):
        weight = torch.nn.Parameter(ones.to(dtype, copy=True))
        optimizer = torch.optim.SGD([weight], lr=update)
        for _ in range(64):
            optimizer.zero_grad()
            with target.autocast(amp_dtype):
                seen = F.linear(ones[:1], weight)
            # The gradient of every entry is exactly 1.
            seen.sum().backward()
            optimizer.step()
        case.equal(f"dtypes of the {dtype} weight and its gradient", [weight.dtype, weight.grad.dtype], [dtype] * 2)
        moved[dtype] = weight.detach()
    expected = torch.full((3, 5), 1 - 64 * update)
    case.identical(f"fp32 weight of 1 after 64 updates of {update}", moved[torch.float32], expected)
    case.identical("control: 16-bit weight after as many", moved[amp_dtype], torch.ones(3, 5, dtype=amp_dtype))


def _representable(form: Format, limit: float) -> Tensor:
    """Return as fp32 every finite number of `form`, of either sign, that is normal in fp32 and finite times `limit`."""
    values = tensor_of(form.finite_patterns(), form).float()
    values[1::2] *= -1
    size = values.abs()
    return values[(size < FP32.largest / limit) & ((size >= FP32.smallest_normal) | (size == 0))]


@contract("AMP-NUMERICS-027")
@pytest.mark.parametrize("exponent", [16, 0, 10, deep("standard", 1), deep("standard", 24), deep("standard", 60)])
def test_unscaling_by_powers_of_two_is_exact(case: Case, target: Target, amp_dtype: torch.dtype, exponent: int) -> None:
    form, scale = FORMATS[amp_dtype], 2.0**exponent
    values = _representable(form, scale)
    parameter = torch.nn.Parameter(torch.zeros(len(values), device=target.device))
    # Multiplied on the CPU in float64 and checked there to be exact in fp32.
    scaled = values.double() * scale
    case.equal("inputs are fp32 numbers", bool((scaled.float().double() == scaled).all()), True)
    parameter.grad = scaled.float().to(target.device)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
    scaler.scale(torch.ones((), device=target.device))
    scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
    case.identical(f"{len(values)} gradients at 2^{exponent}, unscaled", parameter.grad, values)


@contract("AMP-NUMERICS-027")
@pytest.mark.parametrize("exponent", [16, 0, 10, deep("standard", 1), deep("standard", 24), deep("standard", 60)])
def test_scaling_by_powers_of_two_is_exact(case: Case, target: Target, amp_dtype: torch.dtype, exponent: int) -> None:
    values = _representable(FORMATS[amp_dtype], 2.0**exponent)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
    seen = scaler.scale(values.to(target.device))
    case.identical(f"{len(values)} losses times 2^{exponent}", seen, (values.double() * 2.0**exponent).float())


@contract("AMP-NUMERICS-028")
@pytest.mark.parametrize("exponent", [8, deep("standard", 4), deep("standard", 10)])
def test_gradients_do_not_depend_on_the_scale(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, exponent: int
) -> None:
    # Everything is positive, so that nothing cancels, and no gradient comes near the ends of fp16's normal range.
    rows = 1 + torch.rand(8, 12, generator=rng)
    sources = [(0.5 + torch.rand(*shape, generator=rng)) / shape[1] for shape in ((10, 12), (6, 10))]
    gradients = {}
    for scale in (2.0**exponent, 2.0 ** (exponent + 1)):
        weights = leaves_on(target, *sources)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
        with target.autocast(amp_dtype):
            hidden = F.relu(F.linear(rows.to(target.device), weights[0]))
            loss = (F.linear(hidden, weights[1]).float() + 1).pow(2).sum() / 8
        scaler.scale(loss).backward()
        size = torch.cat([weight.grad.abs().flatten() for weight in weights]).cpu()
        case.between(f"scale {scale}: smallest gradient", float(size.min()), 2.0**-12, 2.0**15)
        case.at_most(f"scale {scale}: largest gradient", float(size.max()), 2.0**15)
        scaler.unscale_(torch.optim.SGD(weights, lr=1.0))
        gradients[scale] = [weight.grad for weight in weights]
    first, second = gradients.values()
    for layer in range(2):
        case.identical(f"layer {layer}: gradients at 2^{exponent} and twice that", first[layer], second[layer])
