"""Functions that reach their regions in other ways than a `with torch.autocast(...)` of their own, by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .programs import Tensors

Spelling = Callable[[torch.Tensor, torch.Tensor], Tensors]


def spellings(kind: str, dtype: torch.dtype) -> dict[str, Spelling]:
    """Return functions of two matrices with a region of `dtype` and, inside it, a disabled one."""
    settings: dict[str, Any] = {"dtype": dtype, "cache_enabled": False}
    low, off = torch.autocast(kind, **settings), torch.autocast(kind, enabled=False)
    table, pair = {"low": low, "off": off}, (low, off)
    low_part, off_part = (
        functools.partial(torch.autocast, kind, **settings),
        functools.partial(torch.autocast, kind, enabled=False),
    )

    def nested(outer: Any, inner: Any, x: torch.Tensor, w: torch.Tensor) -> Tensors:
        with outer:
            a = torch.mm(x, w)
            with inner:
                b = torch.mm(a.float(), w)
        return a, b, torch.mm(x, w)

    def values_of_a_dict(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return nested(table["low"], table["off"], x, w)

    def items_of_a_tuple(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return nested(pair[0], pair[1], x, w)

    def default_arguments(x: torch.Tensor, w: torch.Tensor, outer: Any = low, inner: Any = off) -> Tensors:
        return nested(outer, inner, x, w)

    def one_object_twice(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        with low:
            a = torch.mm(x, w)
        b = torch.mm(x, w)
        with low:
            return a, b, torch.mm(x, w)

    def partials(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return nested(low_part(), off_part(), x, w)

    @contextlib.contextmanager
    def opened(enabled: bool) -> Iterator[None]:
        with torch.autocast(kind, enabled=enabled, **settings):
            yield

    def generators(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return nested(opened(True), opened(False), x, w)

    def exit_stack(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(kind, **settings))
            a = torch.mm(x, w)
            stack.enter_context(torch.autocast(kind, enabled=False))
            b = torch.mm(a.float(), w)
        return a, b, torch.mm(x, w)

    def decorated_inside(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        @torch.autocast(kind, **settings)
        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a, b)

        return product(x, w), torch.mm(x, w)

    model = _Decorated(low, off)

    def methods(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        a = model.low(x, w)
        return a, model.exact(a, w), torch.mm(x, w)

    def products(x: torch.Tensor, w: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield torch.mm(x, w)

    def advanced(products: Iterator[torch.Tensor]) -> Tensors:
        with low:
            a = next(products)
            with off:
                b = next(products)
        return a, b, next(products)

    def advanced_generator(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return advanced(products(x, w))

    def advanced_expression(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return advanced(torch.mm(each, w) for each in (x, x, x))

    def advanced_map(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        return advanced(map(torch.mm, (x, x, x), (w, w, w)))

    def delegated(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        def whole() -> Iterator[torch.Tensor]:
            yield from products(x, w)

        return advanced(whole())

    every = (values_of_a_dict, items_of_a_tuple, default_arguments, one_object_twice, partials, generators, exit_stack)
    lazy = (advanced_generator, advanced_expression, advanced_map, delegated)
    return {each.__name__: each for each in (*every, decorated_inside, methods, *lazy)}


class _Decorated:
    """Methods that are decorated with regions."""

    def __init__(self, low: Any, off: Any) -> None:
        self.low, self.exact = low(self._product), off(self._product)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a.float(), b)


NAMES = tuple(spellings("cpu", torch.bfloat16))
