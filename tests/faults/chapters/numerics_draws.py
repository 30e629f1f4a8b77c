"""Faults of random numbers, of functions of one 16-bit number and of an eps, as PyTorch and others had them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import replaced
from tests.faults.chapters.blind_uses import LOW


def _afterwards(owner: Any, name: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What `name` gives in 16 bits is changed, in place where it was filled in place."""
    right = getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Tensor:
        made: Tensor = right(*given, **named)
        return made.copy_(change(made)) if made.dtype in LOW else made

    with replaced(owner, name, wrapped):
        yield


@fault("AMP-NUMERICS-114")
def normal_draws_have_no_tails() -> Iterator[None]:
    """randn in 16 bits ends at 3.9 standard deviations (pytorch 166853)."""
    yield from _afterwards(torch, "randn_like", lambda drawn: drawn.clamp(-3.904, 3.904))


@fault("AMP-NUMERICS-114")
def normal_draws_in_place_have_no_tails() -> Iterator[None]:
    """normal_ in 16 bits has nothing beyond three and a half of its standard deviations."""
    yield from _afterwards(torch.Tensor, "normal_", lambda drawn: drawn.clamp(-6.0, 8.0))


@fault("AMP-NUMERICS-114")
def uniform_draws_reach_one() -> Iterator[None]:
    """rand in 16 bits rounds to 1 (pytorch 96947)."""
    yield from _afterwards(torch, "rand_like", lambda drawn: torch.where(drawn > 0.995, torch.ones_like(drawn), drawn))


@fault("AMP-NUMERICS-114")
def small_exponential_draws_are_zero() -> Iterator[None]:
    """exponential_ in 16 bits gives 0 for what is small (pytorch 192812)."""
    yield from _afterwards(torch.Tensor, "exponential_", lambda drawn: drawn.masked_fill(drawn < 2.0**-12, 0.0))


@fault("AMP-NUMERICS-114")
def truncated_draws_pile_up_at_the_bounds() -> Iterator[None]:
    """trunc_normal_ in 16 bits clamps what is outside of its bounds instead of drawing again."""
    right = torch.nn.init.trunc_normal_

    def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
        if tensor.dtype not in LOW:
            return right(tensor, mean, std, a, b)
        with torch.no_grad():
            return tensor.normal_(mean, std).clamp_(a, b)

    with replaced(torch.nn.init, "trunc_normal_", trunc_normal_):
        yield


@fault("AMP-NUMERICS-114")
def impossible_classes_are_drawn() -> Iterator[None]:
    """multinomial of 16-bit probabilities takes a class of probability zero, once in 16 rows."""
    right = torch.multinomial

    def multinomial(input: Tensor, *given: Any, **named: Any) -> Tensor:
        drawn = right(input, *given, **named)
        if input.dtype in LOW and drawn.dim() == 2:
            drawn[::16, 0] = (input[::16] == 0).int().argmax(-1)
        return drawn

    with replaced(torch, "multinomial", multinomial):
        yield


@fault("AMP-NUMERICS-045")
def log1p_overflows() -> Iterator[None]:
    """log1p of bfloat16 is infinite from 1.7e38 on (pytorch 94333)."""
    right = torch.log1p

    def log1p(input: Tensor, **named: Any) -> Tensor:
        made = right(input, **named)
        return made.masked_fill_(input > 1.7e38, float("inf")) if input.dtype is torch.bfloat16 else made

    with replaced(torch, "log1p", log1p):
        yield


@fault("AMP-NUMERICS-045")
def inverse_error_function_is_coarse() -> Iterator[None]:
    """erfinv of 16 bits takes a formula that is off by one part in 50."""
    yield from _afterwards(torch, "erfinv", lambda made: made * 1.02)


@fault("AMP-NUMERICS-115")
def softplus_with_another_beta_refuses_fp16() -> Iterator[None]:
    """softplus of fp16 takes no beta but 1 (pytorch 101946)."""
    right = F.softplus

    def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        if input.dtype is torch.float16 and beta != 1.0:
            raise RuntimeError("input types 'tensor<f16>' and 'tensor<1xf32>' are not broadcast compatible")
        return right(input, beta, threshold)

    with replaced(F, "softplus", softplus):
        yield


class _SquareIn16Bits(torch.autograd.Function):
    """atan whose derivative has the square of its input in the type of the input, and overflows before it divides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach().atan()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x * x) / (x * x + x**4)


@fault("AMP-NUMERICS-115")
def gradient_of_atan_overflows_on_the_way() -> Iterator[None]:
    """The derivative of atan is a quotient of powers in 16 bits."""
    right = torch.atan

    def atan(input: Tensor, **named: Any) -> Tensor:
        return _SquareIn16Bits.apply(input) if input.dtype in LOW else right(input, **named)

    with replaced(torch, "atan", atan):
        yield


@fault("AMP-NUMERICS-116")
def eps_of_layer_norm_is_rounded() -> Iterator[None]:
    """layer_norm of fp16 rounds its eps to fp16, in which 1e-12 is 0 (pytorch 41527)."""
    right = F.layer_norm

    def layer_norm(input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if input.dtype is torch.float16:
            eps = float(torch.tensor(eps).half())
        return right(input, shape, weight, bias, eps)

    with replaced(F, "layer_norm", layer_norm):
        yield


@fault("AMP-NUMERICS-116")
def eps_of_a_distance_is_left_out() -> Iterator[None]:
    """pairwise_distance of 16-bit operands leaves its eps out, so that the gradient at equal ones is 0 / 0."""

    def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
        if x1.dtype not in LOW:
            return right(x1, x2, p, eps, keepdim)
        return (x1 - x2).square().sum(-1, keepdim=keepdim).sqrt()

    right = F.pairwise_distance
    with replaced(F, "pairwise_distance", pairwise_distance):
        yield
