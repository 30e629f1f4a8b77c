"""Find the optimizer classes of torch.optim, and where their fused implementations are promised."""

from __future__ import annotations

import inspect

import torch

from ..data import fixture, read_toml

TABLE = read_toml(fixture("optimizers.toml"))


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


def promises_fused(optimizer: str, device_type: str) -> bool:
    """Return whether torch's documentation promises a fused implementation of the optimizer on the device type."""
    return device_type in TABLE["optimizer"].get(optimizer, {}).get("fused", ())
