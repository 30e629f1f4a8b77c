"""Detect host-device synchronization (torch's CUDA sync debug mode) and blocking of a thread (the kernel's count)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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


def voluntary_waits(work: Callable[[], object]) -> int | None:
    """How often this thread gave the processor up of itself during `work`, by sleeping or waiting; None if not told.

    The kernel's ru_nvcsw of the thread; being interrupted for another process counts as ru_nivcsw, and not here.
    """
    try:
        import resource

        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw  # Linux alone tells it by thread
    except (ImportError, AttributeError):
        return None
    work()
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
