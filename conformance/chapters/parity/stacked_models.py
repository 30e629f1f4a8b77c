"""Several perceptrons of one shape trained at once: their parameters stacked, one batched product for each Linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Stacked(nn.Module):
    """Models made of Linear layers and of functions of single elements, each with its own parameters and rows.

    [models, rows, features] to [models, rows, outputs]. No model's numbers meet another's, so that in exact arithmetic
    each learns what it would learn alone; the products are those of torch.baddbmm.
    """

    def __init__(self, models: Sequence[nn.Sequential]) -> None:
        super().__init__()
        weights, biases = [], []
        for layers in zip(*models, strict=True):
            if isinstance(layers[0], nn.Linear):
                weights.append(nn.Parameter(torch.stack([layer.weight.detach() for layer in layers])))
                biases.append(nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1)))
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self._layers = list(models[0])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        linears = zip(self.weights, self.biases, strict=True)
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                weight, bias = next(linears)
                rows = torch.baddbmm(bias, rows, weight.transpose(1, 2))
            else:
                rows = layer(rows)
        return rows


def cross_entropies(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each model: [models, rows, classes] and [models, rows] to [models]."""
    losses = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels).mean(1)
