"""P2: a classifier of 128 features by a 128-256-256-10 perceptron, trained with Adam."""

from __future__ import annotations

import torch

from .training import Workload

FEATURES, HIDDEN, CLASSES = 128, 256, 10
BATCHES, ROWS, EPOCHS = 20, 64, 20
LEARNING_RATE = 1e-3


def mlp(device: torch.device, generator: torch.Generator, *, lr: float = LEARNING_RATE) -> Workload:
    """Return 20 batches of 64 rows and a model with torch's default initialization, made on the CPU from `generator`.

    The class of a row is the largest of ten random linear functions of it, so there is something to learn and a
    perceptron can learn it: the loss starts near ln 10 and falls.
    """
    rows = torch.randn(BATCHES * ROWS, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    labels = (rows @ teacher).argmax(1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU()),
        *(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU()),
        torch.nn.Linear(HIDDEN, CLASSES),
    )
    initialise(model, generator)
    model.to(device)
    return Workload(
        model,
        torch.optim.Adam(model.parameters(), lr=lr),
        torch.nn.functional.cross_entropy,
        [
            (inputs.to(device), target.to(device))
            for inputs, target in zip(rows.split(ROWS), labels.split(ROWS), strict=True)
        ],
    )


def initialise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every Linear's weight and bias from U(±1/sqrt(fan in)), torch's default, but from `generator`."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            reach = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                torch.nn.init.uniform_(parameter, -reach, reach, generator=generator)
