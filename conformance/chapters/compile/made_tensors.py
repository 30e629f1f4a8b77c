"""Tensors that a program makes, with and without a type, and what ops with a type of their own make of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Factory: TypeAlias = Callable[..., Tensor]
Made: TypeAlias = Callable[[Tensor], Tensor]

SIZE = 8
# Numbers whose sums and products every type holds. Each factory gets a tensor, and as names a type or nothing.
FACTORIES: Mapping[str, Factory] = {
    "ones": lambda x, **t: torch.ones(SIZE, device=x.device, **t),
    "zeros": lambda x, **t: torch.zeros(SIZE, device=x.device, **t),
    "full": lambda x, **t: torch.full((SIZE,), 0.5, device=x.device, **t),
    "full of an integer": lambda x, **t: torch.full((SIZE,), 2, device=x.device, **t),
    "full of a bool": lambda x, **t: torch.full((SIZE,), True, device=x.device, **t),
    "arange": lambda x, **t: torch.arange(SIZE, device=x.device, **t),
    "arange by a half": lambda x, **t: torch.arange(0, SIZE / 2, 0.5, device=x.device, **t),
    "linspace": lambda x, **t: torch.linspace(0, 4, 5, device=x.device, **t),
    "eye": lambda x, **t: torch.eye(4, device=x.device, **t),
    "tensor": lambda x, **t: torch.tensor([1.5, 0.25], device=x.device, **t),
    "tensor of integers": lambda x, **t: torch.tensor([1, 2], device=x.device, **t),
    "scalar_tensor": lambda x, **t: torch.scalar_tensor(1.5, device=x.device, **t),
    "new_ones": lambda x, **t: x.new_ones(SIZE, **t),
    "new_full": lambda x, **t: x.new_full((SIZE,), 0.5, **t),
    "new_tensor": lambda x, **t: x.new_tensor([1.5, 0.25], **t),
    "ones_like": lambda x, **t: torch.ones_like(x, **t),
    "full_like": lambda x, **t: torch.full_like(x, 0.5, **t),
    "triangle": lambda x, **t: torch.ones(4, 4, device=x.device, **t).tril(),
}
"""Functions that make tensors of numbers that are known."""

UNKNOWN: Mapping[str, Factory] = {
    "empty": lambda x, **t: torch.empty(SIZE, device=x.device, **t),
    "empty_like": lambda x, **t: torch.empty_like(x, **t),
    "new_empty": lambda x, **t: x.new_empty(SIZE, **t),
    "hann_window": lambda x, **t: torch.hann_window(SIZE, device=x.device, **t),
    "logspace": lambda x, **t: torch.logspace(0, 1, 5, device=x.device, **t),
}
RANDOM: Mapping[str, Factory] = {
    "rand": lambda x, **t: torch.rand(SIZE, device=x.device, **t),
    "randn": lambda x, **t: torch.randn(SIZE, device=x.device, **t),
    "rand_like": lambda x, **t: torch.rand_like(x, **t),
    "randn_like": lambda x, **t: torch.randn_like(x, **t),
    "randint": lambda x, **t: torch.randint(0, 5, (SIZE,), device=x.device, **t),
    "randperm": lambda x, **t: torch.randperm(SIZE, device=x.device, **t),
}
"""Functions that make tensors of which the type alone is known."""
WITHOUT_A_TYPE: Mapping[str, Factory] = {
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (SIZE,), device=x.device),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "a quotient of integers": lambda x: torch.arange(SIZE, device=x.device) / 2,
    "a number times integers": lambda x: torch.arange(SIZE, device=x.device) * 0.5,
    "a number elsewhere": lambda x: torch.where(torch.arange(SIZE, device=x.device) > 2, 0.5, 1.5),
}

# Each takes a type by name, or none.
_TYPED: Mapping[str, Callable[..., Tensor]] = {
    "cumsum": lambda made, **t: made.cumsum(0, **t),
    "sum": lambda made, **t: made.sum(**t),
    "prod": lambda made, **t: made.prod(**t),
    "cumprod": lambda made, **t: made.cumprod(0, **t),
}
_TO_FLOATING: Mapping[str, Callable[..., Tensor]] = {
    "nansum": lambda made, **t: made.nansum(**t),
    # Of one element, so that no rounding is in it.
    "mean": lambda made, **t: made.flatten()[:1].mean(**t),
    "softmax": lambda made, **t: F.softmax(made.flatten()[:1], 0, **t),
    "log_softmax": lambda made, **t: F.log_softmax(made.flatten()[:1], 0, **t),
}
_ALONE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "itself": lambda made, x: made,
    "times an input": lambda made, x: made.flatten()[:2] * x[:2],
    "in the type of an input": lambda made, x: made.to(x.dtype),
    "of an input's type": lambda made, x: made.type_as(x),
}
FLOATING = (None, torch.float16, torch.bfloat16, torch.float32)
TYPES = (*FLOATING, torch.int64)
_NAMES = {
    None: "none",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.int64: "int64",
}


def _named(dtype: torch.dtype | None) -> dict[str, Any]:
    return {} if dtype is None else {"dtype": dtype}


def _then(make: Factory, made: torch.dtype | None, op: Callable[..., Tensor], result: torch.dtype | None) -> Made:
    named, given = _named(made), _named(result)
    return lambda x: op(make(x, **named), **given)


def _beside(make: Factory, made: torch.dtype | None, op: Callable[[Tensor, Tensor], Tensor]) -> Made:
    named = _named(made)
    return lambda x: op(make(x, **named), x)


FILLED = (
    *("ones", "zeros", "full", "full of an integer", "full of a bool"),
    *("new_ones", "new_full", "ones_like", "full_like"),
)
# inductor before 2.14 raises where it sums up a filled tensor of no dimension.
NOT_SUMMED_UP = (*FILLED, "scalar_tensor")


def sums() -> dict[str, Made]:
    """Return cumulative sums of tensors that are filled with one number, from each type to each, by name."""
    return {
        f"cumsum in {_NAMES[result]} of {name} in {_NAMES[made]}": _then(
            FACTORIES[name], made, _TYPED["cumsum"], result
        )
        for name, made, result in itertools.product(FILLED, TYPES, TYPES)
        if made is not result or made is None
    }


def expressions() -> dict[str, Made]:
    """Return the other ops of tensors of each type that a program makes, by name, and random numbers of given types."""
    found: dict[str, Made] = {}
    for name, made in itertools.product(FACTORIES, TYPES):
        what = f"{name} in {_NAMES[made]}"
        if made is torch.int64 and name in ("linspace", "arange by a half"):
            continue  # whose steps are no integers
        for op, result in itertools.product(_TYPED, TYPES):
            if op != "cumsum" or name not in NOT_SUMMED_UP:
                found[f"{op} in {_NAMES[result]} of {what}"] = _then(FACTORIES[name], made, _TYPED[op], result)
        for op, result in itertools.product(_TO_FLOATING, FLOATING[1:]):
            found[f"{op} in {_NAMES[result]} of {what}"] = _then(FACTORIES[name], made, _TO_FLOATING[op], result)
        for op in _ALONE:
            found[f"{what}, {op}"] = _beside(FACTORIES[name], made, _ALONE[op])
    return found


def types() -> dict[str, Made]:
    """Return tensors of given types of which no more is known, by name."""
    return {
        f"{name} in {_NAMES[made]}": _then({**UNKNOWN, **RANDOM}[name], made, lambda one: one, None)
        for name, made in itertools.product((*UNKNOWN, *RANDOM), FLOATING[1:])
    }


def by_default(names: Iterable[str]) -> dict[str, Made]:
    """Return tensors that take the default type, by the names of their factories."""
    every = {**FACTORIES, **UNKNOWN, **RANDOM, **WITHOUT_A_TYPE}
    return {name: every[name] for name in names}
