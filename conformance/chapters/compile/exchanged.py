"""Programs that hand numbers from one of the tensors that they are given to another, and write to both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

# Of three square matrices a, b and c and the rows of a permutation; what it returns is compared too.
Program: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]


def swapped(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    """As the weights of a model and their averages are for an evaluation."""
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def swapped_by_data(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    held = a.detach().clone()
    a.data.copy_(c)
    c.data.copy_(held)


def swapped_sums(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    held = a - c
    a.add_(c)
    c.copy_(held)


def swapped_rows(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    held = a[0].clone()
    a[0].copy_(a[1])
    a[1].copy_(held)


def swapped_halves(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    held = a[:2].clone()
    a[:2] = b[2:]
    b[2:] = held


def ordered(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    low, high = torch.minimum(a, c), torch.maximum(a, c)
    a.copy_(low)
    c.copy_(high)


def rotated(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    held = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(held)


def handed_and_zeroed(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    """As gradients are handed to those of float32 weights."""
    b.copy_(a)
    a.zero_()


def handed_and_filled(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    b.copy_(a)
    a.fill_(3)
    c.copy_(b)


def handed_between_writes(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    b.copy_(a)
    a.add_(1)
    c.copy_(a)
    a.mul_(-1)


def accumulated(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    c.add_(a)
    a.zero_()
    b.copy_(c)


def averaged(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    """As momentum is, and the weights that it moves."""
    b.mul_(0.5).add_(a)
    c.sub_(b)
    a.zero_()


def history(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a[1:] = a[:-1].clone()
    a[0] = b[0]


def flipped(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.copy_(a.flip(0))
    b.copy_(a)


def rolled(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.copy_(a.roll(1, 0))


def written_through_a_view(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.t().copy_(b)
    b.copy_(a)


def permuted(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.copy_(a[rows])


def put(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a[rows] = a.clone()


def put_negated(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a[rows] = a * -1
    b.copy_(a)


def copied_rows(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.index_copy_(0, rows, b.to(a.dtype))
    b.zero_()


def added_rows(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.index_add_(0, rows, a.clone())
    b.copy_(a)


def summed(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
    a.copy_(a.cumsum(0))
    b.copy_(a[-1])


def returned(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> Tensor:
    a.add_(c)
    return a.clone()


def returned_after_put(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> Tensor:
    a.index_put_((rows,), b.to(a.dtype))
    return a.clone()


def returned_before(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> Tensor:
    held = a.clone()
    a.zero_()
    return held


def with_products(device_type: str, dtype: torch.dtype) -> Mapping[str, Program]:
    """Return programs of products of a region of a type."""

    def multiplied(a: Tensor, c: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            return torch.mm(a, c)

    def product(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
        made = multiplied(a, c)
        c.copy_(a)
        a.copy_(made)

    def product_in_both(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> None:
        b.copy_(multiplied(a, a))
        a.copy_(b.t())

    def product_taken_away(a: Tensor, b: Tensor, c: Tensor, rows: Tensor) -> Tensor:
        b.sub_(multiplied(a, c))
        a.zero_()
        return b + c

    return {one.__name__: one for one in (product, product_in_both, product_taken_away)}


PROGRAMS: Mapping[str, Program] = {
    one.__name__: one
    for one in (
        swapped,
        swapped_by_data,
        swapped_sums,
        swapped_rows,
        swapped_halves,
        ordered,
        rotated,
        handed_and_zeroed,
        handed_and_filled,
        handed_between_writes,
        accumulated,
        averaged,
        history,
        flipped,
        rolled,
        written_through_a_view,
        permuted,
        put,
        put_negated,
        copied_rows,
        added_rows,
        summed,
        returned,
        returned_after_put,
        returned_before,
    )
}
