"""A training workload (model, optimizer, loss, batches) and one training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

Region = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Workload:
    """A model on its device with the optimizer, loss and batches that it is trained with.

    `batches` are (input, target) pairs, gone through in order, epoch after epoch; `clip` is the largest gradient norm.
    """

    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    clip: float | None = None

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of the step with that number, counted from 0 and over all epochs."""
        return self.batches[step % len(self.batches)]


def train_step(work: Workload, step: int, region: Region, scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return one step as torch's AMP examples write it ("Typical Mixed Precision Training"); the detached loss.

    A disabled scaler makes it the plain step. Gradients are left unscaled and, where the workload says so, clipped.
    """
    inputs, target = work.batch(step)
    work.optimizer.zero_grad()
    with region():
        loss = work.loss(work.model(inputs), target)
    scaler.scale(loss).backward()
    if work.clip is not None:
        scaler.unscale_(work.optimizer)
        torch.nn.utils.clip_grad_norm_(work.model.parameters(), work.clip)
    scaler.step(work.optimizer)
    scaler.update()
    return loss.detach()


def train(work: Workload, steps: int, region: Region, scaler: torch.amp.GradScaler) -> list[float]:
    """Train for that many steps; the loss of each, read only at the end so that no step waits for another."""
    losses = [train_step(work, step, region, scaler) for step in range(steps)]
    return [loss.item() for loss in losses]
