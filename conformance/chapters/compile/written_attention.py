"""Attention that is written out, compiled by inductor, which replaces it by one op, here or in another process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...measure.children import told
from ...oracles.numbers.formats import FORMATS
from .decomposed_ops import error
from .support import SETTINGS

PATIENCE = 300.0
"""Seconds without a word after which only a process that hangs is given up on."""


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softmax(x, dim=-1)


def _bias(q: torch.Tensor) -> torch.Tensor:
    """Return a number for each query and key, alike for all heads."""
    rows = torch.arange(q.shape[-2], device=q.device)
    return ((rows[:, None] - rows) % 3).to(q.dtype).expand(len(q), 1, -1, -1)


# Attention to keys, which are transposed, and values.
ATTENTION: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "divided scores": lambda q, k, v: _softmax(torch.matmul(q, k).div(3.0)).matmul(v),
    "multiplied scores": lambda q, k, v: _softmax(torch.matmul(q, k).mul(0.4)).matmul(v),
    "dropout": lambda q, k, v: torch.nn.functional.dropout(_softmax(torch.matmul(q, k).div(3.0)), 0.0).matmul(v),
    "a scaled query": lambda q, k, v: torch.matmul(_softmax(torch.matmul(q * 0.4, k)), v),
    "masked scores": lambda q, k, v: _softmax(torch.matmul(q, k) / 3.0 + torch.ones_like(q[..., :1])) @ v,
    "divided and masked scores": lambda q, k, v: _softmax(torch.matmul(q, k).div(3.0) + _bias(q)).matmul(v),
    "masked scores and no division": lambda q, k, v: _softmax(torch.matmul(q, k) + _bias(q)).matmul(v),
    "a softmax over the heads": lambda q, k, v: torch.matmul(q, k).div(3.0).softmax(dim=1).matmul(v),
    "a softmax over the batch": lambda q, k, v: (torch.matmul(q, k).div(3.0) + _bias(q)).softmax(dim=0).matmul(v),
}
# What has ended a card: its kernel read the mask at an address that is not aligned (torch 2.11).
ENDED_A_CARD = ("masked scores",)
SHAPE = (2, 2, 8, 16)


@dataclass(frozen=True)
class Compared:
    """Attention of one name: its type and error by inductor, and the largest error; or what it raises in place."""

    name: str
    dtype: torch.dtype | None = None
    error: float = math.nan
    limit: float = math.nan
    raised: str | None = None


def compared(names: Sequence[str], device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[Compared]:
    """Compile the attention of these names as one program, and compare it with eager's and with float64."""
    generator = torch.Generator().manual_seed(seed)
    # Each name has operands of its own, which are views of one tensor: what several share is not replaced.
    drawn = [torch.randn(len(names), *SHAPE, generator=generator).to(device, dtype) for _ in range(3)]

    def every(*operands: torch.Tensor) -> list[torch.Tensor]:
        return [
            ATTENTION[name](q, k.transpose(-2, -1), v)
            for name, q, k, v in zip(names, *(each.unbind() for each in operands), strict=True)
        ]

    with torch.no_grad():
        seen = torch.compile(every, backend="inductor", fullgraph=True)(*drawn)
    expected, exact = every(*drawn), every(*(each.double() for each in drawn))
    for name, ours, theirs, right in zip(names, seen, expected, exact, strict=True):
        # The scores, the probabilities and the sums are rounded, in eager and by one op that replaces them.
        limit = error(theirs, right) + 4 * FORMATS[dtype].unit_roundoff
        yield Compared(name, ours.dtype, error(ours, right), limit)


def compared_elsewhere(names: Sequence[str], device: torch.device, dtype: torch.dtype, seed: int) -> list[Compared]:
    """Compare in a process of its own, whose device alone stops working where a kernel fails."""
    said, code = told(functools.partial(_send, names, device, dtype, seed), PATIENCE, method="spawn")
    return said or [Compared(name, raised=f"nothing, and its process ended with {code}") for name in names]


def _send(names: Sequence[str], device: torch.device, dtype: torch.dtype, seed: int, sender: Any) -> None:
    with torch._inductor.config.patch(SETTINGS):
        try:
            found = list(compared(names, device, dtype, seed))
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            found = [Compared(name, raised=said) for name in names]
    for each in found:
        sender.send(each)
