"""Timed training steps: a perceptron, a residual network, a transformer block and an LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...workloads.training import Region, Workload, train_step
from .operations import FP32, LOW, WORKSPACE, Work, shrunk, sizes

CLASSES = 1000
SCALE = 1.0  # of the loss: none of these steps overflows, as one that is skipped takes less time


@dataclass(frozen=True)
class Step:
    """A training step of one model at one size, and what it costs.

    `flops` are the floating-point operations of its products, forward and backward, as defined, and `least_flops`
    those that no algorithm does without. `weights` counts parameters, `rows` how often the smallest batch of them is
    used, `states` the tensors that the optimizer keeps for each, and `activations` the elements kept for backward.
    """

    name: str
    flops: float
    least_flops: float
    weights: int
    rows: int
    states: int
    activations: int
    make: Callable[[torch.device], Workload]
    size: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are enough for both arms: two models, one set of activations of each type."""
        masters = 2 * self.weights * FP32 * (2 + self.states)
        # What flows backward takes the place of what is freed on the way; a quarter more for the largest of it.
        return masters + self.weights * 2 * LOW + self.activations * (FP32 + LOW) * 5 // 4 + 2 * WORKSPACE

    def arms(self, device: torch.device, region: Region, *, scaled: bool) -> tuple[Work, Work]:
        """A step in fp32 and one inside `region`, each of a model of its own; a GradScaler serves where `scaled`."""
        return self.arm(device, nullcontext, scaled=False), self.arm(device, region, scaled=scaled)

    def arm(self, device: torch.device, region: Region, *, scaled: bool) -> Work:
        """Return one step inside `region`, of a model and an optimizer of its own; it returns the loss."""
        work, numbers = self.make(device), count()
        scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=scaled)

        def step() -> object:
            return train_step(work, next(numbers), region, scaler)

        return step


def _mlp(at: Mapping[str, Any]) -> Step:
    layers, width, rows = at["layers"], at["width"], at["rows"]

    def make(device: torch.device) -> Workload:
        body: list[nn.Module] = []
        for _ in range(layers):
            body += [nn.Linear(width, width, device=device), nn.ReLU()]
        model = nn.Sequential(*body)
        batch = (torch.randn(rows, width, device=device), torch.randn(rows, width, device=device))
        return Workload(model, torch.optim.SGD(model.parameters(), lr=1e-3), F.mse_loss, [batch])

    # Three products a layer, forward and backward, but for the first one's input, which needs no gradient.
    flops = 2.0 * rows * width * width * (3 * layers - 1)
    return Step("step-mlp", flops, flops, layers * width * (width + 1), rows, 0, rows * width * (2 * layers + 2), make)


class _Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 with the stride, 1x1 to four times the channels, and a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int, device: torch.device) -> None:
        super().__init__()
        plan = ((inputs, channels, 1, 1), (channels, channels, 3, stride), (channels, 4 * channels, 1, 1))
        layers: list[nn.Module] = []
        for given, made, kernel, step in plan:
            layers += [*_convolution(given, made, kernel, step, device), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        same = inputs == 4 * channels and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, 4 * channels, 1, stride, device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, device: torch.device) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False, device=device),
        nn.BatchNorm2d(outputs, device=device),
    ]


def _stages(blocks: list[int], channels: int, side: int) -> list[tuple[int, int, int, int]]:
    """Inputs, channels, stride and side of the input for each bottleneck; the stem leaves a quarter of the side."""
    plan, inputs, side = [], channels, side // 4
    for stage, many in enumerate(blocks):
        for block in range(many):
            stride = 2 if stage and not block else 1
            plan.append((inputs, channels << stage, stride, side))
            inputs, side = 4 * (channels << stage), side // stride
    return plan


def _residual_costs(blocks: list[int], channels: int, side: int) -> tuple[float, float, int, int]:
    """For one image, forward: products times two, the least of them, weights, and elements that convolutions write."""
    half = side // 2
    # The stem: 7x7 with stride 2 from three channels. It is not spared, as few libraries do better there.
    flops = least = 2.0 * half * half * channels * 3 * 49
    weights, written = channels * 3 * 49, half * half * channels
    for inputs, narrow, stride, at in _stages(blocks, channels, side):
        out = at // stride
        wide = 4 * narrow
        ones = 2.0 * (at * at * inputs * narrow + out * out * narrow * wide)
        if inputs != wide or stride != 1:
            ones += 2.0 * out * out * inputs * wide
            weights += inputs * wide
            written += out * out * wide
        threes = 2.0 * out * out * narrow * narrow * 9
        flops, least = flops + ones + threes, least + ones + threes / 9  # see Winograd in timed_operations
        weights += inputs * narrow + 9 * narrow * narrow + narrow * wide
        written += at * at * narrow + out * out * (narrow + wide)
    last = 4 * (channels << (len(blocks) - 1))
    return flops + 2.0 * last * CLASSES, least + 2.0 * last * CLASSES, weights + last * CLASSES, written


def _cnn(at: Mapping[str, Any]) -> Step:
    blocks, channels, images, side = at["blocks"], at["channels"], at["images"], at["side"]

    def make(device: torch.device) -> Workload:
        body = [*_convolution(3, channels, 7, 2, device), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        body += [
            _Bottleneck(inputs, narrow, stride, device) for inputs, narrow, stride, _ in _stages(blocks, channels, side)
        ]
        last = 4 * (channels << (len(blocks) - 1))
        body += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, CLASSES, device=device)]
        model = nn.Sequential(*body).to(memory_format=torch.channels_last)
        pixels = torch.randn(images, 3, side, side, device=device).to(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (images,), device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        return Workload(model, optimizer, F.cross_entropy, [(pixels, labels)])

    flops, least, weights, written = _residual_costs(blocks, channels, side)
    # The stem's gradient by its input is not needed.
    spared = 2.0 * (side // 2) ** 2 * channels * 3 * 49
    return Step(
        "step-cnn",
        images * (3 * flops - spared),
        images * (3 * least - spared),
        weights,
        images * (side // 4 >> len(blocks) - 1) ** 2,  # positions of the last stage, which has most of the weights
        1,
        images * 2 * written,  # what a convolution wrote for batch norm, and what that wrote for the next
        make,
    )


class _Transformer(nn.Module):
    """A pre-norm block: causal attention, then a perceptron of four times the width."""

    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, device=device) for _ in range(2))
        self.qkv, self.project = (nn.Linear(width, outputs, device=device) for outputs in (3 * width, width))
        self.widen = nn.Linear(width, 4 * width, device=device)
        self.narrow = nn.Linear(4 * width, width, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


def _transformer(at: Mapping[str, Any]) -> Step:
    width, heads, length, batch = at["width"], at["heads"], at["length"], at["batch"]
    rows = batch * length

    def make(device: torch.device) -> Workload:
        model = nn.Sequential(_Transformer(width, heads, device))
        given = (torch.randn(batch, length, width, device=device), torch.randn(batch, length, width, device=device))
        return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), F.mse_loss, [given])

    # 12 width² weights, three products each, and half of two scores' products (causal), forward and twice backward.
    flops = 6.0 * rows * 12 * width * width + 3 * 2.0 * batch * length * length * width
    # The block's input, two norms, three heads, the mixed ones and their sum, and a perceptron of four times the width
    # before and after its activation; the scores where no kernel is fused.
    activations = rows * width * (1 + 2 + 3 + 2 + 8) + 2 * batch * heads * length * length
    return Step("step-transformer", flops, flops, 12 * width * width, rows, 2, activations, make)


class _Recurrent(nn.Module):
    """Two layers of an LSTM; all states of the upper one."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.lstm(x)[0]
        return states


def _lstm(at: Mapping[str, Any]) -> Step:
    width, length, batch = at["width"], at["length"], at["batch"]
    rows = length * batch

    def make(device: torch.device) -> Workload:
        model = nn.Sequential(_Recurrent(width, device))
        given = (torch.randn(length, batch, width, device=device), torch.randn(length, batch, width, device=device))
        return Workload(model, torch.optim.SGD(model.parameters(), lr=1e-2), F.mse_loss, [given])

    weights = 2 * 8 * width * width
    # Three products a weight, but for the first layer's input.
    flops = 6.0 * rows * weights - 2.0 * rows * 4 * width * width
    return Step("step-lstm", flops, flops, weights, rows, 0, rows * width * 2 * 8, make)


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Step]] = {
    "step-mlp": _mlp,
    "step-cnn": _cnn,
    "step-transformer": _transformer,
    "step-lstm": _lstm,
}

STEPS = tuple(_MAKERS)
"""The names of the steps."""


def step(name: str, size: str, device_type: str, shrink: int = 0) -> Step:
    """Return the step at the named size (fixtures/speed_sizes.toml); `shrink` halves its batch that many times.

    Raises KeyError for a name or size that there is not.
    """
    return replace(_MAKERS[name](shrunk(sizes(device_type, name, size), shrink)), size=size)
