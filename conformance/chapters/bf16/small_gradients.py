"""Train a small regression with gradients below the range of fp16 and a learning rate that compensates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FACTOR = 2.0**-21
"""What the loss is multiplied by. The mean over 256 outputs leaves a gradient of 2^-28 times the error: zero in fp16
(below 2^-25) for any error below 8, and 2^-12, a normal fp16 number, at the default scale of 65536."""

LEARNING_RATE = 0.5 / FACTOR

ROWS, INPUTS, HIDDEN, OUTPUTS = 64, 12, 16, 4


@dataclass(frozen=True)
class Outcome:
    """The result of one training run: first gradients, all losses (without `FACTOR`), and weights before and after."""

    gradients: tuple[torch.Tensor, ...]
    losses: tuple[float, ...]
    before: tuple[torch.Tensor, ...]
    after: tuple[torch.Tensor, ...]

    @property
    def progress(self) -> float:
        """Return the last loss divided by the first."""
        return self.losses[-1] / self.losses[0]

    def lost(self, reference: Outcome) -> float:
        """Return the share of gradient elements that are zero here and not in `reference`."""
        pairs = list(zip(self.gradients, reference.gradients, strict=True))
        kept = sum(int((theirs != 0).sum()) for _, theirs in pairs)
        return sum(int(((ours == 0) & (theirs != 0)).sum()) for ours, theirs in pairs) / kept


def train(
    device: torch.device,
    generator: torch.Generator,
    *,
    dtype: torch.dtype | None,
    scaler: torch.amp.GradScaler | None,
    steps: int,
) -> Outcome:
    """Train for `steps` steps of SGD under autocast to `dtype` (None: in fp32), with `scaler` if one is given.

    `generator` (CPU) makes data and first weights: give each arm one in the same state.
    """
    rows = torch.randn(ROWS, INPUTS, generator=generator).to(device)
    wanted = torch.tanh(rows @ torch.randn(INPUTS, OUTPUTS, generator=generator).to(device) / INPUTS**0.5)
    weights = [
        (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(device).requires_grad_()
        for shape in ((HIDDEN, INPUTS), (OUTPUTS, HIDDEN))
    ]
    before = tuple(weight.detach().clone() for weight in weights)
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)
    losses, gradients = [], ()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            hidden = torch.tanh(torch.nn.functional.linear(rows, weights[0]))
            error = torch.nn.functional.linear(hidden, weights[1]).float() - wanted
            loss = error.pow(2).mean() * FACTOR
        losses.append(loss.item() / FACTOR)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if step == 0:
            gradients = tuple(weight.grad.clone() for weight in weights if weight.grad is not None)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return Outcome(gradients, tuple(losses), before, tuple(weight.detach().clone() for weight in weights))
