"""Error bounds for attention gradients with a logsumexp far below zero, by backend (bounds of bounds_convolution).

Backward computes the probabilities again, as exp(logit - logsumexp). A kernel whose tiles reach beyond the sequence
meets logits of 0 there: exp(0 + 1000) is infinite, and infinity times a zero is NaN, unless the tile is masked.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from ...oracles.numbers.formats import Format, rounded
from ...oracles.numbers.running_error import Rounded
from .attention_kernels import KERNELS, declines
from .bounds_convolution import attention_references
from .op_error import ORDER, Measured, Region, error_ratio

SHIFT = -1024.0
"""What every logit is lowered by: a number of fp16 and bf16, and so is 64, of which -64 * 64 / 4 is made."""

SCALE = 0.25
"""A power of two, as is its root, by which some kernels multiply queries and keys."""

HIDDEN = 0.3
"""The share of keys that a mask hides."""


MASKS = ("none", "causal", "boolean", "float")


@dataclass(frozen=True)
class LowLogits:
    """Attention of a sequence with itself: its mask, its length, the size of a head, and the heads of queries a key."""

    mask: str
    length: int
    size: int
    group: int = 1

    def __str__(self) -> str:
        return f"{self.mask}-{self.length}-of-{self.size}" + "-grouped" * (self.group > 1)


@dataclass(frozen=True)
class Problem:
    """Float64 operands that a 16-bit type holds, and which keys take part (true; None: all of them)."""

    low: LowLogits
    query: Tensor
    key: Tensor
    value: Tensor
    seed: Tensor
    seen: Tensor | None

    @classmethod
    def draw(cls, low: LowLogits, form: Format, rng: torch.Generator) -> Problem:
        """Draw two heads of keys and values, with logits of about 2.5 around `SHIFT` that fp32 holds without error.

        Queries are multiples of 2^-3, keys of 2^-5; logits multiples of 2^-10 below 2^11.
        """
        several, one = (1, 2 * low.group, low.length, low.size), (1, 2, low.length, low.size)
        query = torch.randint(-15, 16, several, generator=rng).double() / 8 * (64 / low.size) ** 0.5
        key = torch.randint(-64, 65, one, generator=rng).double() / 32
        value, seed = (rounded(torch.randn(shape, generator=rng).double(), form) for shape in (one, several))
        if low.mask != "float":
            query[..., 0], key[..., 0] = SHIFT / 64 / SCALE, 64
        return cls(low, query, key, value, seed, _mask(low, rng))

    def options(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of scaled_dot_product_attention other than its operands."""
        found: dict[str, Any] = {"scale": SCALE}
        if self.low.group > 1:
            found["enable_gqa"] = True
        if self.low.mask == "causal":
            found["is_causal"] = True
        elif self.seen is not None:
            mask = self.seen
            if self.low.mask == "float":
                mask = torch.full(mask.shape, SHIFT, dtype=dtype).masked_fill(~mask, float("-inf"))
            found["attn_mask"] = mask.to(device)
        return found

    def logsumexp(self) -> float:
        """Return the largest logarithm of a row's sum of exponentials."""
        logits = self.query @ self.key.repeat_interleave(self.low.group, 1).mT * SCALE
        if self.low.mask == "float":
            logits = logits + SHIFT
        return float(logits.logsumexp(-1).max())

    def references(self, form: Format, floor: float) -> list[Rounded]:
        """Return the result and the gradients of query, key and value with their errors."""
        key, value = (part.repeat_interleave(self.low.group, 1) for part in (self.key, self.value))
        found = attention_references(
            self.query, key, value, self.seen, self.seed, form, floor, scale=SCALE, shift=SHIFT
        )
        return [*found[:2], *(_summed(one, self.low.group, form) for one in found[2:])]


def _mask(low: LowLogits, rng: torch.Generator) -> Tensor | None:
    """Return which keys each query sees; the first always."""
    if low.mask == "none":
        return None
    if low.mask == "causal":
        return torch.ones(low.length, low.length, dtype=torch.bool).tril()
    seen = torch.rand(low.length, low.length, generator=rng) >= HIDDEN
    seen[:, 0] = True
    return seen


def _summed(gradient: Rounded, group: int, form: Format) -> Rounded:
    """Add up the gradients of the heads that share one of keys; each may have been stored in 16 bits."""
    if group == 1:
        return gradient
    error = gradient.error + form.unit_roundoff * gradient.value.abs() / ORDER
    return Rounded(*(part.unflatten(1, (-1, group)).sum(2) for part in (gradient.value, error)))


def attempt(problem: Problem, kernel: str, form: Format, device: torch.device, region: Region) -> list[Tensor] | None:
    """Run the problem on one kernel; return the result and three gradients, or None where it declines the inputs."""
    leaves = [part.float().to(device).requires_grad_() for part in (problem.query, problem.key, problem.value)]
    try:
        with warnings.catch_warnings(), sdpa_kernel(KERNELS[kernel]), region():
            warnings.simplefilter("ignore")  # CUDA gives its reasons to decline as warnings
            seen = F.scaled_dot_product_attention(*leaves, **problem.options(device, form.dtype))
    except RuntimeError as error:
        if not declines(error):
            raise
        return None
    seen.backward(problem.seed.to(seen.dtype).to(device))
    return [seen, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measured(tensors: list[Tensor], references: list[Rounded], what: str, form: Format) -> list[Measured]:
    """Measure the result and the three gradients of one backend."""
    names = {None: "result", 0: "gradient of query", 1: "gradient of key", 2: "gradient of value"}
    return [
        Measured(f"{what}: {name}", tensor.dtype, error_ratio(tensor, reference, form), operand=operand)
        for (operand, name), tensor, reference in zip(names.items(), tensors, references, strict=True)
    ]
