"""How a wait of the host for a CUDA device is noticed: by torch's own debug mode, which raises at each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def raising_at_waits() -> Iterator[None]:
    """Have torch raise RuntimeError ("called a synchronizing CUDA operation") where it makes the host wait.

    Source: torch.cuda.set_sync_debug_mode documentation.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
