"""Seed torch's generators without the cost of backends that are not there."""

from __future__ import annotations

import torch


def seed_torch(seed: int) -> None:
    """Seed torch's global generators, as `torch.manual_seed` does.

    Without an accelerator only the CPU's is there to be seeded, and `torch.manual_seed` would note the stack of its
    caller three times, for backends that might be started later: 2 ms, where a check makes thousands of calls.
    """
    if torch.accelerator.is_available() or hasattr(torch, torch._C._get_privateuse1_backend_name()):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
