"""What functions return: results and what was detached of them, arguments, copies that are written to, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

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


# What returns its operand itself, or a view of all of it.
ITSELF: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dropout that is off": lambda h: functional.dropout(h, 0.5, training=False),
    "dropout of nothing": lambda h: functional.dropout(h, 0.0),
    "dropout of channels that is off": lambda h: functional.dropout1d(h, 0.5, training=False),
    "alpha dropout that is off": lambda h: functional.alpha_dropout(h, 0.5, training=False),
    "a module of dropout that is off": lambda h: nn.Dropout(0.5).eval()(h),
    "an identity": lambda h: nn.Identity()(h),
    "its own type": lambda h: h.to(h.dtype),
    "its own device": lambda h: h.to(h.device),
    "the type of itself": lambda h: h.type_as(h),
    "contiguous": Tensor.contiguous,
    "reshaped to its shape": lambda h: h.reshape(h.shape),
    "a view of its shape": lambda h: h.view_as(h),
    "flattened from the end": lambda h: h.flatten(-1),
    "expanded": lambda h: h.expand_as(h),
    "a slice of all": lambda h: h[:],
    "all of it": lambda h: h[...],
    "the first of one": lambda h: h[None][0],
    "the only chunk": lambda h: h.chunk(1)[0],
    "transposed twice": lambda h: h.t().t(),
    "conjugate": torch.conj,
    "detached": Tensor.detach,
    "a sum to its size": lambda h: h.sum_to_size(h.shape),
}


def written_results(names: tuple[str, ...]) -> Many:
    """Return a function that writes to each of these of a matrix, and so to the matrix."""

    def run(*given: Tensor) -> Results:
        found = []
        for name, h in zip(names, given, strict=True):
            made = ITSELF[name](h)
            made.add_(1)
            found += [h * 1, made * 1]
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


# Functional writes, whose result is a tensor of its own however few numbers their operand has in memory.
FUNCTIONAL: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda wide, order, h: wide.index_add(0, order, h),
    "index_copy": lambda wide, order, h: wide.index_copy(0, order, h),
    "index_put": lambda wide, order, h: wide.index_put((order,), h),
    "index_put, accumulating": lambda wide, order, h: wide.index_put((order,), h, accumulate=True),
    "index_fill": lambda wide, order, h: wide.index_fill(0, order[:2], 3.0),
    "scatter": lambda wide, order, h: wide.scatter(0, order[:, None].expand(4, 4), h),
    "scatter_add": lambda wide, order, h: wide.scatter_add(0, order[:, None].expand(4, 4), h),
    "select_scatter": lambda wide, order, h: wide.select_scatter(h[0], 0, 1),
    "slice_scatter": lambda wide, order, h: wide.slice_scatter(h[:2], 0, 1, 3),
    "diagonal_scatter": lambda wide, order, h: wide.diagonal_scatter(h[0]),
    "masked_fill": lambda wide, order, h: wide.masked_fill(h > 0, 3.0),
}


def written_expanded(names: tuple[str, ...]) -> Many:
    """Return a function that writes to copies of one row of each matrix, and of zeros, that stand for four rows."""

    def run(*given: Tensor) -> Results:
        order = torch.tensor([2, 0, 3, 1], device=given[0].device)
        found = []
        for name, h in zip(names, given, strict=True):
            for row in (h[:1], torch.zeros(1, 4, device=h.device)):
                found.append(FUNCTIONAL[name](row.expand(4, -1), order, h))
        return tuple(found)

    return run


def numbers_of_two_types(weight: Tensor) -> Results:
    """Return what numbers of Python that are equal, and of other types, make of integers, truths and floats."""
    whole, truths = weight.detach().to(torch.int32), weight.detach() > 0
    found: list[Tensor] = []
    for number in (1, 1.0, True, 2, 2.0, 0, 0.0, False):
        found += [weight + number, weight * (whole + number), weight * (truths * number), (whole + number) * 3]
        found += [whole == number, torch.full((2,), number, device=weight.device), torch.where(truths, number, whole)]
    return tuple(found)
