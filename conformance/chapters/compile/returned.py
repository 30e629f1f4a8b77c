"""What functions return: results and what was detached of them, arguments, copies that are written to, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Results: TypeAlias = tuple[Tensor, ...]
# Of two matrices of small integers, of which the first is no leaf.
Program: TypeAlias = Callable[[Tensor, Tensor], Results]
Many: TypeAlias = Callable[..., Results]


def _enabled_inside(x: Tensor, w: Tensor) -> Results:
    with torch.enable_grad():
        return (x @ w,)


def _both_modes(x: Tensor, w: Tensor) -> Results:
    with torch.no_grad():
        stopped = x @ w
    with torch.enable_grad():
        return stopped, x @ w


def _twice(x: Tensor, w: Tensor) -> Results:
    y = x @ w
    return y, y


def _then_detached(x: Tensor, w: Tensor) -> Results:
    y = x @ w
    return y, y.detach()


def _detached_first(x: Tensor, w: Tensor) -> Results:
    y = x @ w
    return y.detach(), y


def _with_a_view(x: Tensor, w: Tensor) -> Results:
    y = x @ w
    return y, y[0], y.t()


def _views_of_a_detached_one(x: Tensor, w: Tensor) -> Results:
    y = x @ w
    kept = y.detach()
    return kept[0], y, kept.t()


def _arguments(x: Tensor, w: Tensor) -> Results:
    return x, w, x @ w


def _views_of_arguments(x: Tensor, w: Tensor) -> Results:
    return x.t(), w[1:], x @ w


def _detached_arguments(x: Tensor, w: Tensor) -> Results:
    return x.detach(), w.detach()[0], x @ w


def _written_argument(x: Tensor, w: Tensor) -> Results:
    x.mul_(2)
    return x, x.detach(), x @ w


PROGRAMS: Mapping[str, Program] = {
    "a result twice": _twice,
    "a result, and detached": _then_detached,
    "detached, and the result": _detached_first,
    "a result and views of it": _with_a_view,
    "views of a detached one": _views_of_a_detached_one,
    "arguments": _arguments,
    "views of arguments": _views_of_arguments,
    "detached arguments": _detached_arguments,
    "an argument that is written to": _written_argument,
    "with gradients inside": _enabled_inside,
    "without and with gradients inside": _both_modes,
}


# What changes no number, and is or is not a copy.
COPIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "plus 0": lambda h: h + 0,
    "plus zeros": lambda h: h + torch.zeros(4, 4, device=h.device),
    "times ones": lambda h: h * torch.ones(4, 4, device=h.device),
    "minus 0": lambda h: h - 0,
    "times 1": lambda h: h * 1,
    "divided by 1": lambda h: h / 1,
    "to the power of 1": lambda h: h**1,
    "clone": Tensor.clone,
    "to a copy": lambda h: h.to(h.dtype, copy=True),
    "its own type": lambda h: h.to(h.dtype),
    "contiguous": Tensor.contiguous,
    "positive": lambda h: +h,
    "cat of one": lambda h: torch.cat((h,)),
    "all of it by index": lambda h: h[torch.arange(len(h), device=h.device)],
    "a slice of all": lambda h: h[:],
    "clamp without limits": lambda h: h.clamp(-1000, 1000),
    "sum over nothing": lambda h: h.unsqueeze(0).sum(0),
    "expanded": lambda h: h.expand(4, 4),
    "repeated once": lambda h: h.repeat(1, 1),
}


def written_copies(names: tuple[str, ...]) -> Many:
    """Return a function that makes each of these of a matrix, and writes to that: a copy keeps its numbers."""

    def run(*given: Tensor) -> Results:
        found = []
        for name, h in zip(names, given, strict=True):
            made = COPIES[name](h)
            h.add_(1)
            found.append(made)
        return tuple(found)

    return run


def _rotated(h: Tensor, order: Tensor) -> None:
    h[order] = h[order.roll(1)]


def _moved(h: Tensor, order: Tensor) -> None:
    h[order.sort().values[1:]] = h[:-1] + 1


# Writes that read numbers of the tensor that they write to.
READ: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "rows in another order": _rotated,
    "rows in the place of the next": _moved,
    "index_copy_": lambda h, order: h.index_copy_(0, order, h[order.roll(1)]),
    "index_put_": lambda h, order: h.index_put_((order,), h[order.roll(2)]),
    "index_add_": lambda h, order: h.index_add_(0, order.roll(1), h[order]),
    "scatter_": lambda h, order: h.scatter_(0, order.roll(1)[:, None].expand(4, 4), h.clone()),
    "copy_ of what is flipped": lambda h, order: h.copy_(h.flip(0)),
    "copy_ of what is transposed": lambda h, order: h.copy_(h.t().clone()),
    "add_ of what is rolled": lambda h, order: h.add_(h.roll(1, 0)),
}


def reading_writes(names: tuple[str, ...]) -> Many:
    """Return a function that does each of these writes to a matrix."""

    def run(*given: Tensor) -> Results:
        order = torch.tensor([2, 0, 3, 1], device=given[0].device)
        for name, h in zip(names, given, strict=True):
            READ[name](h, order)
        return ()

    return run


def numbers_of_two_types(weight: Tensor) -> Results:
    """Return what numbers of Python that are equal, and of other types, make of integers, truths and floats."""
    whole, truths = weight.detach().to(torch.int32), weight.detach() > 0
    found: list[Tensor] = []
    for number in (1, 1.0, True, 2, 2.0, 0, 0.0, False):
        found += [weight + number, weight * (whole + number), weight * (truths * number), (whole + number) * 3]
        found += [whole == number, torch.full((2,), number, device=weight.device), torch.where(truths, number, whole)]
    return tuple(found)
