"""A training workload (model, optimizer, loss, batches) and one training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..measure.pending import run_pending

Region = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Workload:
    """A model on its device with the optimizer, loss and batches that it is trained with.

    `batches` are (input, target) pairs, used in order, epoch after epoch; `clip` is the maximum gradient norm. Where
    the model has several optimizers the `others` step after `optimizer`. Each step sums the gradients of `accumulate`
    batches, each loss divided by their number. `after` runs behind each step, also a skipped one, so that schedules
    stay in phase: schedulers, averages of weights.
    """

    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    clip: float | None = None
    others: tuple[torch.optim.Optimizer, ...] = ()
    accumulate: int = 1
    after: Callable[[], object] | None = None

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return all optimizers, in the order of their steps."""
        return (self.optimizer, *self.others)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of the step with that number, counted from 0 and over all epochs."""
        return self.batches[step % len(self.batches)]


def train_step(work: Workload, step: int, region: Region, scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return one step as torch's AMP examples write it ("Typical Mixed Precision Training"); the detached loss.

    A disabled scaler makes it the plain step. Gradients are left unscaled and, where the workload says so, clipped.
    """
    for optimizer in work.optimizers:
        optimizer.zero_grad()
    losses = []
    for number in range(step * work.accumulate, (step + 1) * work.accumulate):
        inputs, target = work.batch(number)
        with region():
            loss = work.loss(work.model(inputs), target)
            loss = loss / work.accumulate if work.accumulate > 1 else loss
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    if work.clip is not None:
        for optimizer in work.optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(work.model.parameters(), work.clip)
    for optimizer in work.optimizers:
        scaler.step(optimizer)
    scaler.update()
    if work.after is not None:
        work.after()
    run_pending(losses[0].device.type)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def train(work: Workload, steps: int, region: Region, scaler: torch.amp.GradScaler) -> list[float]:
    """Train for that many steps; the loss of each, read only at the end so that no step waits for another."""
    losses = [train_step(work, step, region, scaler) for step in range(steps)]
    return [loss.item() for loss in losses]
