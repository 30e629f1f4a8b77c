"""Training programs as data: a model, its batches, and on which rank which step overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS, FEATURES, HIDDEN, OUTPUTS, WORDS = 4, 6, 8, 4, 10
SCALE, INTERVAL, RATE, MOMENTUM = 2.0**10, 2, 2.0**-4, 0.5
HUGE = 2.0**127
"""Times the gradient of a loss that is scaled by `SCALE` it is infinite in float32 and in bfloat16."""

FAR = 8.0

Region: TypeAlias = Callable[[], AbstractContextManager[Any]]


class Perceptron(nn.Module):
    """Two Linear layers; it returns what the first one gave, in the type that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Convolutions(nn.Module):
    """A convolution, a group normalization, a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(16, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x[:, None])).relu().flatten(1))


class Attention(nn.Module):
    """A block of attention with layer normalization, over the features as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(1, HIDDEN), nn.LayerNorm(HIDDEN)
        self.mixed, self.second = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x[..., None])
        query, key, value = self.mixed(self.norm(hidden)).chunk(3, -1)
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.second((hidden + found).mean(1))


class Tied(nn.Module):
    """One weight used twice, the second time transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(OUTPUTS, FEATURES))
        self.bias = nn.Parameter(torch.empty(OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.weight).relu()
        return functional.linear(functional.linear(hidden, self.weight.t()), self.weight, self.bias)


class Checkpointed(Perceptron):
    """The perceptron with its first layer recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        return self.second(hidden.relu())


class Island(Perceptron):
    """The perceptron with a layer outside autocast, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.middle(hidden.float())
        return self.second(hidden)


class Unused(Perceptron):
    """The perceptron with a layer that its forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(FEATURES, HIDDEN)


class Trained(nn.Module):
    """A model with a parameter at its end that adds nothing, and whose gradient overflows on demand.

    `blow` is (rows, 4): zero, or in its last column what the last element of `tail` is multiplied by. That element's
    gradient alone is infinite then, so that one shard of the parameters has an inf and the others none.
    """

    def __init__(self, model: nn.Module, region: Region | None = None) -> None:
        super().__init__()
        self.model, self.tail, self.region = model, nn.Parameter(torch.zeros(4)), region

    def forward(self, x: torch.Tensor, blow: torch.Tensor) -> torch.Tensor:
        if self.region is None:
            out = self.model(x)
        else:
            with self.region():
                out = self.model(x)
        return self.joined(out, blow)

    def joined(self, out: torch.Tensor, blow: torch.Tensor) -> torch.Tensor:
        """Return the outputs with what overflows on demand."""
        return out.float() + (blow * self.tail).sum(1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "convolutions": Convolutions,
    "attention": Attention,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "island": Island,
    "unused": Unused,
}


@dataclass(frozen=True)
class Batch:
    """What one rank sees in one micro-batch; all tensors have ROWS rows."""

    x: torch.Tensor
    goal: torch.Tensor
    blow: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return it on a device."""
        return Batch(self.x.to(device), self.goal.to(device), self.blow.to(device))


@dataclass(frozen=True)
class Program:
    """A training run: the model, the dtype of its regions, its length and its overflows.

    `overflows` has by step the rank whose batch overflows. `micro` is the number of micro-batches that a step
    accumulates.
    """

    model: str
    dtype: torch.dtype
    steps: int = 4
    overflows: dict[int, int] = field(default_factory=dict)
    micro: int = 1
    huge: float = HUGE
    seed: int = 1
    exact: bool = False
    """Small integers throughout, and a loss that is linear: no sum of the first step rounds, in whichever order."""
    device_type: str = "cpu"

    def device(self, index: int) -> torch.device:
        """Return the CPU, or the accelerator of that index: a rank's own has its number."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, index)

    def built(self, region: Region | None = None, *, seed: int | None = None, index: int = 0) -> Trained:
        """Return the model with random parameters on a device; `region` is what its forward opens by itself."""
        model = MODELS[self.model]()
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.5 * self._numbers(generator, *parameter.shape))
        return Trained(model, region).to(self.device(index))

    def batches(self, rank: int, *, index: int | None = None) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of one rank, on its own device or on the one of an index."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        device = self.device(rank if index is None else index)
        for step in range(self.steps):
            overflows = self.overflows.get(step) == rank
            yield [self._batch(generator, overflows).to(device) for _ in range(self.micro)]

    def _batch(self, generator: torch.Generator, overflows: bool) -> Batch:
        x, goal = (self._numbers(generator, ROWS, width) for width in (FEATURES, OUTPUTS))
        blow = torch.zeros(ROWS, 4)
        if overflows:
            # A model that has almost reached its goals has gradients too small to overflow: this goal is far.
            blow[-1, -1], goal = self.huge, goal + FAR
        return Batch(x, goal, blow)

    def _numbers(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        if self.exact:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch: its part of the mean over the step."""
        return self.criterion(model(batch.x, batch.blow), batch.goal) / self.micro

    def criterion(self, out: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        """Return the loss of outputs, a mean over their rows."""
        if self.exact:
            return (out * goal).sum() / len(goal)
        return functional.mse_loss(out, goal)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer over parameters."""
        return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


@dataclass
class Step:
    """The result of one step in one rank: the losses of its micro-batches, and what the step left, on the CPU.

    Gradients and parameters are whole tensors by name; `norm` is what clipping returned.
    """

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    scale: float
    norm: float | None = None
