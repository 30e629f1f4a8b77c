"""Second derivatives of ops in 16 bits, each term of them alone, by each order of modes, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .twice_ops import Twice

Derivatives = dict[str, Tensor]
Region = Callable[[], AbstractContextManager[Any]]
Layout = Callable[[Tensor], Tensor]  # of a copy that lies in memory in some order


def derivatives(
    op: Twice,
    values: list[Tensor],
    rng: torch.Generator,
    region: Region,
    layout: Layout = Tensor.contiguous,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each term: of each first gradient, the gradient by each operand and by what came in.

    Those of the sum of all first gradients follow, for which a double backward is given all of its operands at once.
    `values` are the operands; what comes in and the weights of the gradients are numbers of the generator. All of them
    are laid out by `layout`.
    """
    leaves = [layout(value.detach()).requires_grad_() for value in values]
    with region():
        result = op.call(*leaves)
    incoming = layout(draw(result, rng)).requires_grad_()
    first = torch.autograd.grad(result, leaves, incoming, create_graph=True)
    slopes = {f"gradient {number}": slope for number, slope in enumerate(first) if slope.requires_grad}
    weights = [layout(draw(slope, rng)) for slope in slopes.values()]
    terms = {name: ([slope], [weight]) for (name, slope), weight in zip(slopes.items(), weights, strict=True)}
    if len(slopes) > 1:
        terms["all gradients"] = ([*slopes.values()], weights)
    for name, (differentiated, weighted) in terms.items():
        second = torch.autograd.grad(
            differentiated, [*leaves, incoming], weighted, retain_graph=True, allow_unused=True
        )
        for place, found in enumerate(second):
            by = "what comes in" if place == len(leaves) else f"operand {place}"
            yield f"{name} by {by}", _or_zero(found)


def first_derivatives(op: Twice, values: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of its sum."""
    leaves = [value.detach().requires_grad_() for value in values]
    result = op.call(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def tangent(op: Twice, values: list[Tensor], along: list[Tensor], region: Region, learning: bool) -> Tensor:
    """Return how the result moves where the operands move along `along`, by forward mode; they are learnt or not."""
    with forward_ad.dual_level():
        leaves = [value.detach().requires_grad_(learning) for value in values]
        duals = [forward_ad.make_dual(leaf, step) for leaf, step in zip(leaves, along, strict=True)]
        with region():
            found = forward_ad.unpack_dual(op.call(*duals)).tangent
        return _or_zero(found)


def tangent_by_reverse(op: Twice, values: list[Tensor], along: list[Tensor]) -> tuple[Tensor, float]:
    """Return the same by two backward passes: of the gradients, times `along`, by what comes in.

    The second value is its size; that of a single number, whose terms may cancel, is the sum of theirs.
    """
    leaves = [value.detach().requires_grad_() for value in values]
    result = op.call(*leaves)
    incoming = torch.ones_like(result).requires_grad_()  # the gradients are linear in it
    gradients = torch.autograd.grad(result, leaves, incoming, create_graph=True, allow_unused=True)
    terms = [one * step for one, step in zip(gradients, along, strict=True) if one is not None]
    found = torch.autograd.grad(torch.stack([one.sum() for one in terms]).sum(), incoming)[0]
    return found, float(found.norm() if found.numel() > 1 else sum(one.abs().sum() for one in terms))


def forward_over_reverse(
    op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor, region: Region
) -> Derivatives:
    """Return how each gradient moves where the operands move along `along`: forward mode through a backward pass."""
    with forward_ad.dual_level():
        duals, result = _moved(op, values, along, region)
        gradients = torch.autograd.grad(result, duals, incoming, allow_unused=True)
        return {
            f"gradient {number}": _or_zero(None if one is None else forward_ad.unpack_dual(one).tangent)
            for number, one in enumerate(gradients)
        }


def reverse_over_forward(
    op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor, region: Region
) -> Derivatives:
    """Return the gradients of the tangent of the result: backward through what forward mode computed."""
    with forward_ad.dual_level():
        duals, result = _moved(op, values, along, region)
        tangent = forward_ad.unpack_dual(result).tangent
        # A dual is a view of its operand with a tangent; the gradient by it is the one by the operand.
        gradients = torch.autograd.grad(tangent, duals, incoming.to(tangent.dtype), allow_unused=True)
        return {f"gradient {number}": _or_zero(one) for number, one in enumerate(gradients)}


def reverse_over_reverse(op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor) -> Derivatives:
    """Return what both orders with forward mode compute, by two backward passes: the gradients of each move's part."""
    leaves = [value.detach().requires_grad_() for value in values]
    first = torch.autograd.grad(op.call(*leaves), leaves, incoming, create_graph=True, allow_unused=True)
    moved = [
        (one * step).sum() for one, step in zip(first, along, strict=True) if one is not None and one.requires_grad
    ]
    second = torch.autograd.grad(torch.stack(moved).sum(), leaves, allow_unused=True) if moved else [None] * len(leaves)
    return {f"gradient {number}": _or_zero(one) for number, one in enumerate(second)}


def _moved(op: Twice, values: list[Tensor], along: list[Tensor], region: Region) -> tuple[list[Tensor], Tensor]:
    """Return the operands, each moving along its step, and the result."""
    duals = [
        forward_ad.make_dual(value.detach().requires_grad_(), step) for value, step in zip(values, along, strict=True)
    ]
    with region():
        return duals, op.call(*duals)


def _or_zero(derivative: Tensor | None) -> Tensor:
    return torch.zeros(()) if derivative is None else derivative.detach()


def draw(like: Tensor, rng: torch.Generator) -> Tensor:
    """Return numbers that every 16-bit type has, so that both runs have the same."""
    signs = torch.randint(0, 2, like.shape, generator=rng) * 2 - 1  # of one sign, they cancel in a normalization
    return (torch.randint(4, 9, like.shape, generator=rng) * signs / 8).to(like.device, like.dtype)
