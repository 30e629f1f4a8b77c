"""Ways to run a function on a batch of each input: vmap with its options, nested, and with gradients of each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .derivative_ways import Inputs, numbers, squared

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class BatchedWay:
    """A way to run `f` on inputs with a batch dimension in front; a loop over that dimension gives the same.

    With `gradients` both give the gradients of the sum of squares of each sample.
    """

    name: str
    run: Callable[[Function, Inputs], tuple[Tensor, ...]]
    gradients: bool = False

    @property
    def id(self) -> str:
        return self.name


def loop(f: Function, batch: Inputs, *, gradients: bool) -> tuple[Tensor, ...]:
    """Return the results of each sample, stacked; with `gradients` those of backward."""
    results = []
    for sample in zip(*batch, strict=True):
        if gradients:
            leaves = tuple(one.detach().requires_grad_() for one in sample)
            results.append(torch.autograd.grad(squared(f)(*leaves), leaves))
        else:
            results.append((f(*sample),))
    return tuple(torch.stack(group) for group in zip(*results, strict=True))


def _last(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    moved = tuple(one.movedim(0, -1) for one in batch)
    return (torch.func.vmap(f, in_dims=-1, out_dims=-1)(*moved).movedim(-1, 0),)


def _nested(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    halves = tuple(one.unflatten(0, (2, -1)) for one in batch)
    return (torch.func.vmap(torch.func.vmap(f))(*halves).flatten(0, 1),)


def _crossed(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    """All first inputs with all others: of that table, the diagonal."""
    rest = (None,) * (len(batch) - 1)
    inner = torch.func.vmap(f, in_dims=(None, *(0 for _ in rest)))
    table = torch.func.vmap(inner, in_dims=(0, *rest))(*batch)
    return (torch.stack([table[at, at] for at in range(len(table))]),)


def _per_sample(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    return torch.func.vmap(torch.func.grad(squared(f), numbers(batch)))(*batch)


def _gradient_of_batch(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    def total(*given: Tensor) -> Tensor:
        return squared(torch.func.vmap(f))(*given)

    return torch.func.grad(total, numbers(batch))(*batch)


def _backward_of_batch(f: Function, batch: Inputs) -> tuple[Tensor, ...]:
    leaves = tuple(one.detach().requires_grad_() for one in batch)
    return torch.autograd.grad(squared(torch.func.vmap(f))(*leaves), leaves)


def _plain(f: Function, batch: Inputs, **options: int) -> tuple[Tensor, ...]:
    return (torch.func.vmap(f, **options)(*batch),)


WAYS = (
    BatchedWay("vmap", _plain),
    BatchedWay("chunks", partial(_plain, chunk_size=3)),
    BatchedWay("last-dimension", _last),
    BatchedWay("nested", _nested),
    BatchedWay("crossed", _crossed),
    BatchedWay("vmap-of-grad", _per_sample, gradients=True),
    BatchedWay("grad-of-vmap", _gradient_of_batch, gradients=True),
    BatchedWay("backward-of-vmap", _backward_of_batch, gradients=True),
)
