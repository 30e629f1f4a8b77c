"""Broken attention: what kernels get wrong beyond the sequence and between grouped heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

TILE = 128


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    tile: int = TILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention's backward in whole tiles, of which what lies beyond the keys is zeros and is not masked."""
    length, scale = key.shape[-2], query.shape[-1] ** -0.5 if scale is None else scale
    beyond, group = -length % tile, query.shape[1] // key.shape[1]
    wide = [F.pad(part.float(), (0, 0, 0, beyond)).repeat_interleave(group, 1) for part in (key, value)]
    logits = query.float() @ wide[0].mT * scale
    if attn_mask is not None:
        logits = logits + F.pad(attn_mask.float(), (0, beyond))
    if causal:
        logits[..., :length] = logits[..., :length].masked_fill(
            torch.ones(query.shape[-2], length, dtype=torch.bool).triu(1), -math.inf
        )
    p = torch.exp(logits - logsumexp.float().reshape(*logits.shape[:-1], 1))
    ds = p * (grad.float() @ wide[1].mT - (grad.float() * out.float()).sum(-1, keepdim=True))
    of_heads = (ds.mT @ query.float() * scale, p.mT @ grad.float())
    of_key, of_value = (one[..., :length, :].unflatten(1, (-1, group)).sum(2) for one in of_heads)
    return (ds @ wide[0] * scale).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


@fault("AMP-NUMERICS-101")
def attention_reaches_beyond_the_keys() -> Iterator[None]:
    """The backward of fused attention takes exp(0 - logsumexp) for the zeros that fill up its last tile."""
    with kernel("_scaled_dot_product_flash_attention_for_cpu_backward", _backward, "CPU"):
        yield


@fault("AMP-NUMERICS-088")
def masks_are_read_without_gaps() -> Iterator[None]:
    """The backward of fused attention in 16 bits takes the keys of a mask for neighbours in memory."""

    def backward(
        grad: torch.Tensor, query: torch.Tensor, *given: Any, attn_mask: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        narrow = query.dtype in (torch.float16, torch.bfloat16)
        if narrow and attn_mask is not None and attn_mask.stride(-1) > 1:
            attn_mask = attn_mask.as_strided(attn_mask.shape, (*attn_mask.stride()[:-1], 1))
        return _backward(grad, query, *given, attn_mask=attn_mask, tile=1, **options)

    with kernel("_scaled_dot_product_flash_attention_for_cpu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-101")
def grouped_queries_meet_the_wrong_heads() -> Iterator[None]:
    """Heads of keys are repeated in turns, 0 1 0 1, in place of 0 0 1 1."""
    right = F.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("enable_gqa", False):
            key, value = (part.repeat(1, query.shape[1] // part.shape[1], 1, 1) for part in (key, value))
        return right(query, key, value, *args, **kwargs)

    with replaced(F, "scaled_dot_product_attention", attend):
        yield
