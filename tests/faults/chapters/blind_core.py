"""Faults of lists of many tensors and of norms of gradients of several types."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tests.faults import fault
from tests.faults.breaking import given_the_original, kernel


@fault("AMP-CAST-006")
def long_lists_promote_by_their_first_tensors() -> Iterator[None]:
    """cat in a CPU region takes the widest type of the first eight tensors for the type of all."""

    def cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        first = functools.reduce(torch.promote_types, (one.dtype for one in tensors[:8]))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.cat([one.to(first) for one in tensors], dim)

    with kernel("cat", cat, "AutocastCPU"):
        yield


@fault("AMP-CLIP-046")
def total_norms_have_the_range_of_the_first_gradient() -> Iterator[None]:
    """The total norm of gradients of several types is rounded to the type of the first."""

    def rounded(original: Any, tensors: Any, *given: Any, **named: Any) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm: torch.Tensor = original(listed, *given, **named)
        return norm.to(listed[0].dtype).to(norm.dtype) if listed else norm

    with given_the_original(clip_grad, "_get_total_norm", rounded):
        yield
