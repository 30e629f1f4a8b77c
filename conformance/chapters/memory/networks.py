"""Small networks of torch's own modules with their optimizer and batches, for counting bytes while training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

CLASSES, ROWS, BATCHES = 10, 4, 3


@dataclass(frozen=True)
class Net:
    """A model, its optimizer, batches of (input, class numbers), and the layer that it ends with."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    last: torch.nn.Module

    def loss(self, number: int) -> torch.Tensor:
        """Return the mean cross-entropy of the batch with that number."""
        inputs, classes = self.batches[number % len(self.batches)]
        return torch.nn.functional.cross_entropy(self.model(inputs), classes)

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that live throughout: parameters, buffers and batches."""
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *(tensor for batch in self.batches for tensor in batch),
        ]


class _Convolutions(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        self.second = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
        self.drop = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = torch.relu(self.second(h) + h)
        result: torch.Tensor = self.last(self.drop(h.mean((2, 3))))
        return result


class _Transformer(torch.nn.Module):
    def __init__(self, dropout: float, *, again: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, activation="gelu", batch_first=True)
        self.again = again
        self.last = torch.nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)
        result: torch.Tensor = self.last(h.mean(1))
        return result


class _Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Cell by cell: oneDNN's LSTM of the CPU knows fp16 on few processors, and refuses it on the others.
        self.cell = torch.nn.LSTMCell(16, 12)
        self.last = torch.nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in x[:, :3].unbind(1):
            state = self.cell(part, state)
        assert state is not None
        result: torch.Tensor = self.last(state[0])
        return result


NETS: dict[str, tuple[tuple[int, ...], Callable[[float], torch.nn.Module]]] = {
    "convolutions": ((3, 8, 8), _Convolutions),
    "transformer": ((6, 16), _Transformer),
    "checkpointed": ((6, 16), lambda dropout: _Transformer(dropout, again=True)),
    "lstm": ((6, 16), lambda dropout: _Recurrent()),
}


def net(name: str, device: torch.device, generator: torch.Generator, *, dropout: float = 0.1) -> Net:
    """Return the named network with SGD and momentum, initialized on the CPU so that every device gets the same."""
    shape, make = NETS[name]
    model = make(dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model.to(device)
    batches = [
        (
            torch.randn(ROWS, *shape, generator=generator).to(device),
            torch.randint(0, CLASSES, (ROWS,), generator=generator).to(device),
        )
        for _ in range(BATCHES)
    ]
    last = model.get_submodule("last")
    # One operation for all parameters, where torch would take one for each: counters of operations have less to record.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, foreach=True if device.type == "cpu" else None
    )
    return Net(model, optimizer, batches, last)
