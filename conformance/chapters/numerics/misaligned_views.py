"""Operations on unaligned 16-bit views: vector loads and matrix units require 16-byte alignment.

Every number is a small integer, so that results and gradients are exact in fp16 and bf16, whatever the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers import exact
from .op_error import Region


def _one_off(tensor: Tensor) -> Tensor:
    """Return the same numbers and strides, one element into a longer store."""
    store = torch.full((tensor.numel() + 9,), 7.0, dtype=tensor.dtype, device=tensor.device)
    return store.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _odd_rows(tensor: Tensor) -> Tensor:
    """Return the same numbers in rows that are one element longer, so that each begins elsewhere."""
    return F.pad(tensor, (1, 0), value=7.0)[..., 1:]


PLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "aligned": lambda tensor: tensor,
    "one-off": _one_off,
    "odd-rows": _odd_rows,
}


@dataclass(frozen=True)
class Operation:
    """An operation, its float64 formula, and its operands, integers of float32, made of a generator of the CPU."""

    name: str
    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]

    def expected(self, operands: tuple[Tensor, ...], seed: Tensor) -> list[Tensor]:
        """Return result and gradients in float64."""
        leaves = [operand.double().requires_grad_() for operand in operands]
        result = self.formula(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, seed.double())]

    def measure(
        self, operands: list[Tensor], seed: Tensor, region: Region, place: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Run it in a region on operands that lie as `place` puts them, and backward from a seed that does."""
        leaves = [place(operand).detach().requires_grad_() for operand in operands]
        with region():
            result = self.call(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, place(seed.to(result.dtype)))]


def _integers(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=rng).float()


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the value of the one key whose logit is 0; the gradients of query and key are nothing then."""
    logits = exact.product(query, key.mT)
    return exact.product((logits == 0).double() + 0 * logits, value)


def _one_key_each(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of 0 for one key of each query and -128 for all others, whose exponentials are nothing in fp32."""
    places = torch.randperm(64, generator=rng)
    query = -128 * (1 - torch.eye(64)).expand(1, 2, 64, 64)
    return query.clone(), torch.eye(64)[places].expand(1, 2, 64, 64).clone(), _integers(rng, 1, 2, 64, 64)


OPERATIONS: dict[str, Operation] = {
    one.name: one
    for one in (
        Operation("mm", torch.mm, exact.product, lambda rng: (_integers(rng, 32, 64), _integers(rng, 64, 48))),
        Operation(
            "mm of transposed",
            lambda left, right: torch.mm(left.t(), right.t()),
            lambda left, right: exact.product(left.mT, right.mT),
            lambda rng: (_integers(rng, 64, 32), _integers(rng, 48, 64)),
        ),
        Operation("bmm", torch.bmm, exact.product, lambda rng: (_integers(rng, 2, 32, 64), _integers(rng, 2, 64, 48))),
        Operation(
            "linear",
            F.linear,
            lambda x, weight, bias: exact.product(x, weight.mT) + bias,
            lambda rng: (_integers(rng, 32, 64), _integers(rng, 48, 64), _integers(rng, 48)),
        ),
        Operation(
            "convolution",
            lambda image, weight: F.conv2d(image, weight, padding=1),
            lambda image, weight: exact.convolution(image, weight, padding=1),
            lambda rng: (_integers(rng, 2, 16, 8, 8), _integers(rng, 16, 16, 3, 3)),
        ),
        Operation(
            "convolution, channels last",
            lambda image, weight: F.conv2d(image, weight, padding=1),
            lambda image, weight: exact.convolution(image, weight, padding=1),
            lambda rng: (
                _integers(rng, 2, 16, 8, 8).contiguous(memory_format=torch.channels_last),
                _integers(rng, 16, 16, 3, 3).contiguous(memory_format=torch.channels_last),
            ),
        ),
        Operation("attention", _attend, _attention, _one_key_each),
    )
}
