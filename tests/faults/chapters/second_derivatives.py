"""Second derivatives that only another order of modes, or other sizes of operands, shows to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from tests.faults import fault
from tests.faults.breaking import given_the_original, replaced

LOW = (torch.float16, torch.bfloat16)


class _Tanh(torch.autograd.Function):
    """tanh, differentiable as often as one likes by backward passes, and not in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.detach().tanh()
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope * (1 - _Tanh.apply(x).square())


@fault("AMP-NUMERICS-126")
def tanh_has_no_forward_mode_in_16_bits() -> Iterator[None]:
    """tanh of 16-bit tensors raises where they have tangents."""
    original = torch.tanh

    with replaced(torch, "tanh", lambda x: _Tanh.apply(x) if x.dtype in LOW else original(x)):
        yield


@fault("AMP-NUMERICS-126")
def tangents_of_sin_lose_their_graph() -> Iterator[None]:
    """The tangent of the sine of a 16-bit tensor has half of its gradient by the operand."""
    original = torch.sin

    def sine(x: Tensor) -> Tensor:
        primal, tangent = forward_ad.unpack_dual(x) if x.dtype in LOW and _in_forward_mode() else (x, None)
        if tangent is None:
            return original(x)
        slope = primal.cos()
        return forward_ad.make_dual(original(primal), tangent * (slope + slope.detach()) / 2)

    with replaced(torch, "sin", sine):
        yield


@fault("AMP-NUMERICS-126", level="standard")
def tangents_of_weights_lose_their_graph() -> Iterator[None]:
    """A 16-bit layer_norm drops the tangent of its weight from its gradients in forward mode."""
    original = F.layer_norm

    def layer_norm(x: Tensor, shape: Any, weight: Tensor | None = None, *given: Any) -> Tensor:
        if weight is None or x.dtype not in LOW or not _in_forward_mode():
            return original(x, shape, weight, *given)
        return original(x, shape, forward_ad.unpack_dual(weight).primal, *given)

    with replaced(F, "layer_norm", layer_norm):
        yield


class _Softplus(torch.autograd.Function):
    """softplus, with the slope 1 / (1 + exp(-x)), whose own slope is the quotient of two infinities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x) + (-x.abs()).float().exp().log1p().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope / (1 + torch.exp(-x))


@fault("AMP-NUMERICS-127")
def second_derivatives_of_softplus_overflow() -> Iterator[None]:
    """The second derivative of softplus in 16 bits divides infinities."""
    original = F.softplus

    def softplus(x: Tensor, *given: Any) -> Tensor:
        found: Tensor = _Softplus.apply(x) if x.dtype in LOW else original(x, *given)
        return found

    with replaced(F, "softplus", softplus):
        yield


class _Var(torch.autograd.Function):
    """Unbiased variance of rows, whose slope is multiplied before it is divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach().float().var(-1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (slope[..., None] * 256) * (x - x.mean(-1, keepdim=True)) * (2 / (x.shape[-1] - 1) / 256)


@fault("AMP-NUMERICS-127", level="standard")
def derivatives_of_scaled_variances_overflow() -> Iterator[None]:
    """The slope of a float16 variance is multiplied by 256 on the way: infinite where a loss is scaled."""
    original = Tensor.var

    def var(x: Tensor, *given: Any, **options: Any) -> Tensor:
        if x.dtype is not torch.float16 or given != (-1,) or options:
            return original(x, *given, **options)
        found: Tensor = _Var.apply(x)
        return found

    with replaced(Tensor, "var", var):
        yield


@fault("AMP-NUMERICS-127", level="standard")
def second_derivatives_of_weak_rms_norms_overflow() -> Iterator[None]:
    """rms_norm of 16-bit tensors is composed in 16 bits of powers of the deviation."""
    original = F.rms_norm

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if x.dtype is not torch.float16:
            return original(x, shape, weight, eps)
        scaled = x * 64
        found = x * (scaled.square().mean(-1, keepdim=True).pow(-1.5) * 2.0**18 + 0 * scaled).pow(1 / 3)
        return found if weight is None else found * weight

    with replaced(F, "rms_norm", rms_norm):
        yield


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


@fault("AMP-NUMERICS-126")
def tangents_of_tanh_are_constants_in_every_type() -> Iterator[None]:
    """The tangent of tanh takes its slope for a constant, in float64 as well (as those of normalizations, 196700)."""
    original = torch.tanh

    def tanh(x: Tensor) -> Tensor:
        primal, tangent = forward_ad.unpack_dual(x) if _in_forward_mode() else (x, None)
        if tangent is None:
            return original(x)
        found = original(primal)
        return forward_ad.make_dual(found, tangent * (1 - found.detach() ** 2))

    with replaced(torch, "tanh", tanh):
        yield


class _Cross(torch.autograd.Function):
    """The sum of binary cross entropies, of whose first gradient half is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return -(y * x.log() + (1 - y) * (1 - x).log()).sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        first = (x - y) / (x * (1 - x))
        return slope * (first + first.detach()) / 2, slope * ((1 - x).log() - x.log())


@fault("AMP-NUMERICS-117", level="standard")
def second_derivatives_of_summed_cross_entropies_are_halved() -> Iterator[None]:
    """The second derivative of binary_cross_entropy is another one where the losses are summed (59477)."""
    original = F.binary_cross_entropy

    def loss(x: Tensor, y: Tensor, *given: Any, **named: Any) -> Tensor:
        return _Cross.apply(x, y) if named == {"reduction": "sum"} and not given else original(x, y, *given, **named)

    with replaced(F, "binary_cross_entropy", loss):
        yield


@fault("AMP-NUMERICS-117", level="standard")
def second_derivatives_forget_where_embeddings_were() -> Iterator[None]:
    """The gradient of an embedding's weights in 16 bits is a constant to a second backward pass."""
    original = F.embedding

    def rows(index: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        found = original(index, weight, *given, **named)
        if weight.dtype in LOW and found.requires_grad:
            found.register_hook(lambda slope: slope.detach())
        return found

    with replaced(F, "embedding", rows):
        yield


@fault("AMP-NUMERICS-147", level="standard")
def pools_of_given_operands_drop_the_tangent() -> Iterator[None]:
    """max_pool1d of an operand that needs no gradient loses the tangent of forward mode (78342)."""

    def pooled(original: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
        moving = _in_forward_mode() and not x.requires_grad
        return original(forward_ad.unpack_dual(x).primal if moving else x, *given, **named)

    with given_the_original(torch, "max_pool1d", pooled):
        yield


@fault("AMP-NUMERICS-147")
def tangents_of_gelu_are_those_of_another_form() -> Iterator[None]:
    """The tangent of gelu in 16 bits is a tenth larger."""

    def larger(original: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
        found = original(x, *given, **named)
        if x.dtype not in LOW or not _in_forward_mode():
            return found
        primal, tangent = forward_ad.unpack_dual(found)
        return found if tangent is None else forward_ad.make_dual(primal, tangent * 1.1)

    with given_the_original(F, "gelu", larger):
        yield


@fault("AMP-NUMERICS-147")
def sums_with_numbers_share_the_tangent() -> Iterator[None]:
    """The tangent of x + 1 is the tensor that x has (79664)."""

    def added(original: Callable[..., Tensor], x: Tensor, other: Any, *given: Any, **named: Any) -> Tensor:
        found = original(x, other, *given, **named)
        if not _in_forward_mode() or not isinstance(other, int) or (moved := forward_ad.unpack_dual(x).tangent) is None:
            return found
        shared = forward_ad.make_dual(forward_ad.unpack_dual(found).primal, moved)
        return shared if shared.dtype == found.dtype else found

    with given_the_original(Tensor, "__add__", added):
        yield
