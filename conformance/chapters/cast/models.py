"""Define four small networks with a loss that together use the ops of common models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Draw = Callable[..., torch.Tensor]
"""Makes a floating tensor of the shape that it is given."""


class ConvNet(nn.Module):
    """Convolutions with batch norm, pooling, a transposed convolution and a classifier, on images of 3 by 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 2)
        x = F.relu(self.up(F.relu(self.down(x))))
        logits = self.head(x.flatten(1))
        return logits, _classified(logits)


class TransformerBlock(nn.Module):
    """An embedding, a pre-norm block of attention and an MLP, and a head that shares the embedding's weight."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.heads = fused, 2
        self.embedding = nn.Embedding(11, 8)
        self.position, self.gain = nn.Parameter(torch.empty(6, 8)), nn.Parameter(torch.empty(4))
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.project = nn.Linear(8, 24), nn.Linear(8, 8)
        self.widen, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens) + self.position
        x = x + self.project(self.attention(self.norm_1(x)))
        x = x + self.narrow(F.gelu(self.widen(self.norm_2(x))))
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)
        return logits, _classified(logits)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape(batch, length, 3 * self.heads, width // self.heads).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        query, key = query * self.gain, key * self.gain  # float32 again, as after a rotary position
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            logits = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
            mixed = F.softmax(logits, dim=-1) @ value
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GatedRecurrence(nn.Module):
    """An LSTM of four steps, unrolled into its gates, and a linear output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 5
        self.inward, self.onward, self.read = nn.Linear(3, 20), nn.Linear(5, 20, bias=False), nn.Linear(5, 2)

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = cell = sequence.new_zeros(sequence.shape[1], self.width)
        states = []
        for step in sequence:
            entry, forget, change, exit_ = (self.inward(step) + self.onward(hidden)).chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(change)
            hidden = torch.sigmoid(exit_) * torch.tanh(cell)
            states.append(hidden)
        output = self.read(torch.cat(states))
        return output, F.mse_loss(output, torch.ones_like(output, dtype=torch.float32))


class Recommender(nn.Module):
    """DLRM: embedding bags and a bottom MLP, their pairwise dot products, a top MLP, one click logit."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 6, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(6 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.bottom(dense)
        vectors = torch.stack([features, *(bag(sparse) for bag in self.bags)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1, device=products.device)
        pairs = products.flatten(1).index_select(1, 4 * rows + columns)
        logits = self.top(torch.cat([features, pairs], dim=1)).squeeze(1)
        clicks = torch.ones_like(logits, dtype=torch.float32)
        return logits, F.binary_cross_entropy_with_logits(logits, clicks)


def _classified(logits: torch.Tensor) -> torch.Tensor:
    """Compute cross entropy as its two ops, log_softmax and nll_loss."""
    labels = torch.arange(logits.shape[0], device=logits.device) % logits.shape[1]
    return F.nll_loss(F.log_softmax(logits, dim=1), labels)


@dataclass(frozen=True)
class Program:
    """A network on the meta device, its inputs, and the parameters that may be 16-bit.

    `floats` are the shapes of the floating inputs; `tokens`, where there are any, the shape and range of an integer
    input that comes after them. `lowered` are the prefixes of parameters that only ops of the lower-precision lists
    and lookups read: a model may be given those in 16 bits.
    """

    network: nn.Module
    floats: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], int] | None
    lowered: tuple[str, ...]

    def weights(self, draw: Draw) -> dict[str, torch.Tensor]:
        """Return random parameters, scaled by the root of their last dimension, and buffers of zeros and ones."""
        drawn = {name: draw(*old.shape) / math.sqrt(old.shape[-1]) for name, old in self.network.named_parameters()}
        return {**drawn, **dict(self._buffers(next(iter(drawn.values())).device))}

    def inputs(self, draw: Draw, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return random floating-point inputs, and integers that cycle through their range."""
        drawn = [draw(*shape) for shape in self.floats]
        if self.tokens is None:
            return tuple(drawn)
        shape, high = self.tokens
        return (*drawn, (torch.arange(math.prod(shape), device=device) * 3 % high).reshape(shape))

    def __call__(
        self, weights: Mapping[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the loss."""
        result: tuple[torch.Tensor, torch.Tensor] = torch.func.functional_call(self.network, dict(weights), inputs)
        return result

    def _buffers(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name, old in self.network.named_buffers():
            fill = 1 if name.endswith("running_var") else 0
            yield name, torch.full(old.shape, fill, dtype=old.dtype, device=device)


def programs() -> dict[str, Program]:
    """Create the programs by name; new ones in each call, since a network keeps the state of a failed call."""
    with torch.device("meta"):
        return {
            "cnn": Program(ConvNet(), ((4, 3, 8, 8),), None, ("stem", "down", "up", "head")),
            "transformer": Program(TransformerBlock(fused=False), (), ((2, 6), 11), ("embedding", "qkv", "narrow")),
            "transformer-sdpa": Program(TransformerBlock(fused=True), (), ((2, 6), 11), ("position", "project")),
            "lstm": Program(GatedRecurrence(), ((4, 3, 3),), None, ("inward", "read")),
            "dlrm": Program(Recommender(), ((5, 4),), ((5, 3), 7), ("bottom", "bags.1", "top.2")),
        }
