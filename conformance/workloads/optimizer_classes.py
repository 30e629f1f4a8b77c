"""Find the optimizer classes of torch.optim."""

from __future__ import annotations

import inspect

import torch


def present() -> tuple[str, ...]:
    """Return the names of the optimizer classes that torch.optim has, sorted."""
    return tuple(
        sorted(
            name
            for name, value in vars(torch.optim).items()
            if inspect.isclass(value)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
            and not name.startswith("_")
        )
    )
