"""What ranks of the tests do: return, raise, die and hang."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
from torch import distributed


def total(number: int) -> float:
    """Return the sum over the ranks of `number` plus the rank."""
    tensor = torch.tensor(float(number + distributed.get_rank()))
    distributed.all_reduce(tensor)
    return float(tensor)


def raises(rank: int) -> str:
    """Raise in one rank."""
    if distributed.get_rank() == rank:
        raise KeyError("mine")
    return "fine"


def dies(rank: int) -> Any:
    """Die of a signal in one rank, while the others wait for it."""
    if distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(0)


def hangs(rank: int) -> str:
    """Wait for ever in one rank."""
    if distributed.get_rank() == rank:
        threading.Event().wait()
    return "fine"
