"""Train with AMP in eager, or with a part of the step compiled, through batches one of which overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

OVERFLOW = 1
BATCHES = 4
# Of Adam and AdamW, and of SGD.
LEARNING_RATE = 0.01
RATE, MOMENTUM = 0.1, 0.9
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, foreach=False),
    "SGD-foreach": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, foreach=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE, foreach=False),
    "AdamW-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True),
    "Adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True),
}
"""Optimizers by name; a fused one gets the scale and found_inf and skips by itself."""

PARTS = ("loss", "optimizer", "scaler", "iteration")
"""The parts of a step that are compiled: forward and loss, `optimizer.step`, step and update of the scaler, all."""


@dataclass(frozen=True)
class Iteration:
    """The loss scale and the weights after an iteration."""

    scale: float
    tensors: dict[str, torch.Tensor]


def train(
    device: torch.device,
    dtype: torch.dtype,
    optimizer_name: str,
    seed: int,
    compile: Callable[[Any], Any] = lambda function: function,
    part: str = "",
) -> Iterator[Iteration]:
    """Train a perceptron; `compile` is applied to the `part`. Yield each iteration."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((8, 6), (8,), (4, 8))
    weights = [(torch.randn(shape, generator=generator) / 3).to(device).requires_grad_() for shape in shapes]
    batches = [torch.randn(5, 6, generator=generator).to(device) for _ in range(BATCHES)]
    batches[OVERFLOW] = batches[OVERFLOW] * float("inf")
    optimizer = OPTIMIZERS[optimizer_name](weights)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            h = functional.gelu(functional.linear(x, weights[0], weights[1]))
            return functional.mse_loss(functional.linear(h, weights[2]).float(), x[:, :4])

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def iteration(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = loss_of(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        step()

    if part == "loss":
        loss_of = compile(loss_of)
    elif part == "optimizer":
        optimizer.step = compile(optimizer.step)
    elif part == "scaler":
        step = compile(step)
    elif part == "iteration":
        iteration = compile(iteration)
    for x in batches:
        iteration(x)
        tensors = {f"weight {number}": weight.detach().clone() for number, weight in enumerate(weights)}
        yield Iteration(scaler.get_scale(), tensors)
