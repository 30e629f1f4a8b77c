"""What a device raises for tensors that it does not have: of a dtype, or with a sparse layout."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TypeAlias

import torch

Refusals: TypeAlias = frozenset[tuple[type[Exception], str]]
"""Exceptions by their class and message."""
_ERRORS = (RuntimeError, TypeError)


@functools.cache
def dtype_refusals(device: torch.device, dtype: torch.dtype) -> Refusals:
    """Return the exceptions that a device without `dtype` raises for its tensors.

    Empty where the device has tensors of `dtype`, and where it makes none at all, as one that was lost.
    """
    return _raised(
        device,
        lambda: torch.ones(1, dtype=dtype, device=device),
        lambda: torch.ones(1, device=device).to(dtype),
        lambda: torch.ones(1, dtype=dtype).to(device),
    )


@functools.cache
def sparse_refusals(device: torch.device) -> Refusals:
    """Return the exceptions that a device without sparse COO tensors raises for them; empty as `dtype_refusals`."""
    return _raised(
        device,
        lambda: torch.eye(2, device=device).to_sparse(),
        lambda: torch.eye(2).to_sparse().to(device),
        lambda: torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, device=device), (2,)
        ),
    )


def _raised(device: torch.device, *calls: Callable[[], object]) -> Refusals:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.ones(1, device=device)
        except _ERRORS:
            return frozenset()
        found = set()
        for call in calls:
            try:
                call()
            except _ERRORS as error:
                found.add((type(error), str(error)))
        return frozenset(found)
