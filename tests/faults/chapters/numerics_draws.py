"""Faults of random numbers and of functions of one 16-bit number, as PyTorch and others had them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
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
