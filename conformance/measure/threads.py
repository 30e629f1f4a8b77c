"""Run torch's CPU operations on one thread where the work is too small to share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations on one thread, then on as many as before.

    On a busy machine a second thread is waited for at every small operation, which can take many times the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
