"""Check the arithmetic of a training step: master weights, scaling, unscaling."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, FP32, Format, tensor_of
from .foreach_ops import FOREACH
from .support import leaves_on, slug


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


def _lists(target: Target, rng: torch.Generator, dtypes: Sequence[torch.dtype], count: int) -> list[list[torch.Tensor]]:
    """Return lists of positive tensors of these dtypes in turn, of several shapes, one empty, one not contiguous."""
    shapes = ((3,), (4, 5), (), (2, 3, 2), (0,), (7,), (5, 4))
    made = []
    for _ in range(count):
        plain = [torch.rand(shape, generator=rng) + 0.5 for shape in shapes]
        placed = [one.to(target.device, dtypes[at % len(dtypes)]) for at, one in enumerate(plain)]
        made.append([*placed[:-1], placed[-1].t()])
    return made


@contract("AMP-NUMERICS-118")
@pytest.mark.parametrize("op", list(FOREACH), ids=slug)
def test_lists_of_several_types(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    one_of = FOREACH[op]
    wrong, judged = {}, 0
    for dtypes in ((torch.float32, amp_dtype), (amp_dtype, torch.float32), (amp_dtype,), (torch.float32,)):
        given = _lists(target, rng, dtypes, one_of.lists)
        regions: dict[str, contextlib.AbstractContextManager[Any]] = {
            "outside": contextlib.nullcontext(),
            "in a region": target.autocast(amp_dtype),
        }
        for name, region in list(regions.items())[: 1 if one_of.new else 2]:
            ours, theirs, before = ([[one.clone() for one in each] for each in given] for _ in range(3))
            expected = one_of.loop(*theirs)
            case.require_call(target, f"run {op}", partial(one_of.call, *before))
            with region:
                seen = one_of.call(*ours)
            for place, (one, other) in enumerate(zip(seen, expected, strict=True)):
                judged += 1
                # A fused kernel may round once where the loop rounds twice.
                wide, exact = one.detach().cpu().double(), other.detach().cpu().double()
                bound = 4 * torch.finfo(other.dtype).eps * exact.abs()
                if (one.dtype, one.shape) != (other.dtype, other.shape) or not bool(
                    ((wide - exact).abs() <= bound).all()
                ):
                    wrong[f"{name}, tensor {place} of {dtypes}"] = one.dtype
    case.equal(f"{op}: tensors that differ from the loop", wrong, {})
    case.at_least("tensors judged", judged, 28)
