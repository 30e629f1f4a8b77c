"""Check error bounds of the gradients of reductions, normalizations and losses, operand by operand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, FP32, Format, rounded
from .bounds_layouts import LaidOut, laid_out
from .bounds_loss import LOSSES
from .bounds_normalization import NORMALIZATIONS
from .bounds_reduction import REDUCTIONS
from .op_error import Measured, Op, half_spacing
from .support import TELLING, by_loss, by_name, formats, hold, is_listed, runs

DIFFERENTIABLE = {name: op for name, op in REDUCTIONS.items() if op.gradient is not None}
OPERANDS = ("input", "weight", "bias")


def _of_gradients(found: Sequence[Measured]) -> list[Measured]:
    return [one for one in found if one.operand is not None]


@contract("AMP-NUMERICS-061")
@by_name(DIFFERENTIABLE)
def test_gradients_of_reductions(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    found = [one for _, some in runs(case, target, rng, op, backward=True) for one in _of_gradients(some)]
    hold(case, f"gradient of {op.name}", found)


def _is_left_to_066(op: Op, target: Target, form: Format, one: Measured) -> bool:
    """Return whether it is a parameter's gradient of a layer norm that ran on a 16-bit tensor."""
    return op.policy == "layer_norm" and form is not FP32 and not is_listed(op, target) and one.operand != 0


@contract("AMP-NUMERICS-063")
@by_name(NORMALIZATIONS)
def test_gradients_of_normalisations(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    _hold_gradients(case, target, rng, op)


def _hold_gradients(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    by_operand: dict[int, list[Measured]] = {}
    for form, some in runs(case, target, rng, op, backward=True):
        for one in _of_gradients(some):
            if one.operand is not None and not _is_left_to_066(op, target, form, one):
                by_operand.setdefault(one.operand, []).append(one)
    for operand, found in by_operand.items():
        hold(case, f"gradient of the {OPERANDS[operand]} of {op.name}", found)


def _depth(laid_out: LaidOut) -> str:
    """Return the level from which on a case runs: at quick images with the three layouts of models."""
    telling = ("channels last", "channels last"), ("channels last", "contiguous"), ("contiguous", "expanded")
    if laid_out.of == "images" and (laid_out.input, laid_out.gradient) in telling:
        return "quick"
    return "standard" if laid_out.of == "images" or laid_out.gradient == "strided" else "full"


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("laid_out", [deep(_depth(one), one, id=one.id) for one in laid_out()])
def test_gradients_of_each_layout(case: Case, target: Target, rng: torch.Generator, laid_out: LaidOut) -> None:
    _hold_gradients(case, target, rng, laid_out.op)


def _of_softmax(name: str, y: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities of a result, what its kernel adds up of the incoming gradient, and the gradient."""
    p = y if name == "softmax" else y.exp()
    total = (seed * p if name == "softmax" else seed).sum(-1, keepdim=True)
    return p, total, p * (seed - total) if name == "softmax" else seed - p * total


@contract("AMP-NUMERICS-063")
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_softmax_where_terms_cancel(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    rows, length = 64, 100
    for dtype in case.supported(target):
        if FORMATS[dtype] not in formats(NORMALIZATIONS[name], target, dtype):
            case.unsupported("nothing is known of softmax of 16-bit tensors on this device")
        x = (3 * torch.randn(rows, length, generator=rng)).to(target.device, dtype).requires_grad_()
        with target.autocast(dtype):
            y = torch.softmax(x, -1) if name == "softmax" else torch.log_softmax(x, -1)
        kept = FORMATS[y.dtype]
        # All of a row near 7.5, which cancel but for a thirtieth: terms that were rounded to 16 bits would stay.
        seed = rounded(7.5 + torch.randn(rows, length, generator=rng).double() / 4, kept)
        y.backward(seed.to(target.device, y.dtype))
        p, total, expected = _of_softmax(name, y.detach().cpu().double(), seed)
        # In fp32: a sum of `length` terms, its product, a difference, and an exponential of 4 roundings; some CPU
        # kernels keep the sum in the type of the result (aten/src/ATen/native/cpu/SoftMaxKernel.cpp).
        size = p * total.abs() + seed.abs() * (p if name == "softmax" else 1)
        allowed = (length + 8) * FP32.unit_roundoff * size + p * half_spacing(total.abs(), kept)
        allowed = allowed + half_spacing(expected.abs() + allowed, FORMATS[dtype])
        error = float(((x.grad.cpu().double() - expected).abs() / allowed).max())
        case.equal("dtype of the gradient", x.grad.dtype, dtype)
        case.at_most(f"{name} of {FORMATS[dtype].name}: worst error of a gradient", error, 1.0, "of the bound")
        if name == "softmax" and kept is not FP32:
            lowered = rounded(seed * p, kept)
            lowered = lowered - rounded(p * rounded(lowered.sum(-1, keepdim=True), kept), kept)
            control = float(((lowered - expected).abs() / allowed).max())
            case.at_least("control: terms rounded to 16 bits, error", control, TELLING, "of the bound")


@contract("AMP-NUMERICS-065")
@by_loss()
def test_gradients_of_losses(case: Case, target: Target, rng: torch.Generator, loss: str) -> None:
    for op in (op for name, op in LOSSES.items() if name.split(" ")[0] == loss):
        found = [
            one for _, some in runs(case, target, rng, op, backward=True, is_loss=True) for one in _of_gradients(some)
        ]
        hold(case, f"gradient of {op.name}", found)


@contract("AMP-NUMERICS-066")
def test_parameters_of_a_layer_norm(case: Case, target: Target, rng: torch.Generator) -> None:
    op = NORMALIZATIONS["layer_norm"]
    found = [
        one
        for form, some in runs(case, target, rng, op, backward=True)
        for one in _of_gradients(some)
        if form is not FP32 and one.operand != 0
    ]
    if not found:
        case.unsupported("nothing is known of layer norms of 16-bit tensors on this device")
    for operand in (1, 2):
        hold(case, f"gradient of the {OPERANDS[operand]}", [one for one in found if one.operand == operand])
