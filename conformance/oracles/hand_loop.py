"""Mixed precision training written out: casts, loss scale, check, unscaling and skipping, without torch.amp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class HandScale:
    """A loss scale kept by hand: a power of two, so that scaling and unscaling float32 numbers is exact.

    Defaults and rules are those of the torch.amp.GradScaler docstring. None as the scale means no scaling.
    """

    scale: float | None = 65536.0
    growth_interval: int = 2000
    clean: int = 0
    skipped: list[bool] = field(default_factory=list)

    def update(self, finite: bool) -> None:
        """Halve after an overflow; double after `growth_interval` steps without one."""
        self.skipped.append(not finite)
        if self.scale is None:
            return
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.clean == self.growth_interval:
            self.scale, self.clean = self.scale * 2.0, 0


def forward_by_hand(model: torch.nn.Sequential, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run Linear layers in `dtype` on casts of their float32 parameters, everything else in what it is given.

    `inputs` is (rows, features), the result (rows, outputs) in `dtype`.
    """
    hidden = inputs
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            hidden = functional.linear(hidden.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        else:
            hidden = layer(hidden)
    return hidden


def step_by_hand(
    model: torch.nn.Sequential,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batch: Batch,
    dtype: torch.dtype,
    scale: HandScale,
    clip: float | None = None,
) -> torch.Tensor:
    """One training step; `loss_function` is given 16-bit outputs. Returns the detached float32 loss."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_function(forward_by_hand(model, inputs, dtype), target)
    factor = scale.scale
    (loss if factor is None else loss * factor).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = factor is None or all(bool(gradient.isfinite().all()) for gradient in gradients)
    if factor is not None:
        for gradient in gradients:
            gradient.mul_(1.0 / factor)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if finite:
        optimizer.step()
    scale.update(finite)
    return loss.detach()


def train_by_hand(
    model: torch.nn.Sequential,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable[Batch],
    dtype: torch.dtype,
    scale: HandScale,
    clip: float | None = None,
) -> list[float]:
    """A step for every batch; the losses."""
    return [step_by_hand(model, optimizer, loss_function, batch, dtype, scale, clip).item() for batch in batches]
