"""P1: a regression by one Linear 1024-512 with AdamW and gradients clipped to norm 1."""

from __future__ import annotations

import torch

from .mlp import initialise
from .training import Workload

FEATURES, OUTPUTS, ROWS, STEPS = 1024, 512, 256, 100
LEARNING_RATE = 1e-3


def linear(device: torch.device, generator: torch.Generator, *, lr: float = LEARNING_RATE) -> Workload:
    """Return one batch of 256 rows with random targets, and a Linear, drawn on the CPU from `generator`.

    There are more weights than equations (1024 a column against 256 rows), so the loss can fall to zero.
    """
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    target = torch.randn(ROWS, OUTPUTS, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, OUTPUTS))
    initialise(model, generator)
    model.to(device)
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=lr),
        torch.nn.functional.mse_loss,
        [(inputs.to(device), target.to(device))],
        clip=1.0,
    )
