"""The ops over lists of tensors that optimizers, clipping and averages use, and the loop that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Listed:
    """An op that takes `lists` lists of positive numbers and returns one, and the loop that it stands for."""

    call: Callable[..., list[Tensor]]
    loop: Callable[..., list[Tensor]]
    lists: int = 1
    new: bool = False  # makes new tensors, of types that the lists of ops may decide in a region


def _in_place(name: str, *more: Any, lists: int = 1, each: bool = False) -> Iterator[tuple[str, Listed]]:
    """Yield by name an op with `lists` lists, and the loop of the method of that name; `each`: a list of numbers."""

    def listed(*tensors: list[Tensor]) -> list[Tensor]:
        given = [[0.25 * (1 + place) for place in range(len(tensors[0]))]] if each else more
        getattr(torch, f"_foreach_{name}_")(*tensors, *given)
        return tensors[0]

    def looped(*tensors: list[Tensor]) -> list[Tensor]:
        for place, row in enumerate(zip(*tensors, strict=True)):
            given = [0.25 * (1 + place)] if each else more
            first, *others = row
            if name in ("addcmul", "addcdiv") and given:
                getattr(first, f"{name}_")(*others, value=given[0])
            else:
                getattr(first, f"{name}_")(*others, *given)
        return tensors[0]

    suffix = " of numbers" if each else "".join(f" {one}" for one in more)
    yield f"{name}_ of {lists}{suffix}", Listed(listed, looped, lists)


def _new(
    name: str, *more: Any, lists: int = 1, loop: Callable[..., Tensor] | None = None
) -> Iterator[tuple[str, Listed]]:
    single = loop or getattr(torch, name)

    def listed(*tensors: list[Tensor]) -> list[Tensor]:
        return list(getattr(torch, f"_foreach_{name}")(*tensors, *more))

    def looped(*tensors: list[Tensor]) -> list[Tensor]:
        return [single(*row, *more) for row in zip(*tensors, strict=True)]

    yield f"{name} of {lists}" + "".join(f" {one}" for one in more), Listed(listed, looped, lists, new=True)


def _added(*tensors: list[Tensor], alpha: float = 0.75) -> list[Tensor]:
    torch._foreach_add_(*tensors, alpha=alpha)
    return tensors[0]


def _added_singly(*tensors: list[Tensor], alpha: float = 0.75) -> list[Tensor]:
    return [one.add_(other, alpha=alpha) for one, other in zip(*tensors, strict=True)]


def _zeroed(tensors: list[Tensor]) -> list[Tensor]:
    torch._foreach_zero_(tensors)
    return tensors


_FUNCTIONS = ("sqrt", "rsqrt", "reciprocal", "neg", "abs", "exp", "log", "sigmoid", "sign", "floor", "tanh")
FOREACH: dict[str, Listed] = {
    **dict(one for name in ("add", "sub", "mul", "div") for one in _in_place(name, lists=2)),
    **dict(one for name in ("add", "sub", "mul", "div", "pow") for one in _in_place(name, 0.75)),
    **dict(one for name in ("add", "mul", "div") for one in _in_place(name, each=True)),
    "add_ of 2, alpha": Listed(_added, _added_singly, 2),
    **dict(_in_place("lerp", 0.5, lists=2)),
    **dict(_in_place("lerp", 0.999, lists=2)),
    **dict(_in_place("lerp", lists=3)),
    **dict(_in_place("addcmul", 0.5, lists=3)),
    **dict(_in_place("addcdiv", -0.5, lists=3)),
    **dict(_in_place("addcmul", lists=3, each=True)),
    **dict(_in_place("addcdiv", lists=3, each=True)),
    **dict(_in_place("copy", lists=2)),
    **dict(one for name in ("maximum", "minimum", "add", "mul") for one in _new(name, lists=2)),
    **dict(one for name in ("clamp_max", "clamp_min") for one in _new(name, 0.9)),
    **dict(one for name in _FUNCTIONS if hasattr(torch, f"_foreach_{name}") for one in _new(name)),
    **dict(one for order in (1, 2) for one in _new("norm", order, loop=torch.linalg.vector_norm)),
    "zero_": Listed(_zeroed, lambda tensors: [one.zero_() for one in tensors]),
}
