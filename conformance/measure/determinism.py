"""Use deterministic algorithms, or any, and restore what was chosen before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(enabled: bool, *, warn_only: bool = False) -> Iterator[None]:
    """Set torch.use_deterministic_algorithms inside."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
