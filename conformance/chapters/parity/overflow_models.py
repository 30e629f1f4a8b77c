"""Small models with an injected non-finite value at a known op, and models that stay finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFunction = Callable[[Any, Any], Tensor]

WIDTH = 16


class Function(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs)


class Attention(nn.Module):
    """One head of attention with queries times `factor` and -inf above the diagonal, or everywhere (`all_masked`)."""

    def __init__(self, factor: float = 1.0, *, all_masked: bool = False) -> None:
        super().__init__()
        self.factor, self.all_masked = factor, all_masked
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.query(inputs) * self.factor, self.key(inputs), self.value(inputs)
        logits = query @ key.transpose(-1, -2) / WIDTH**0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(hidden if self.all_masked else hidden.triu(1), float("-inf"))
        return torch.softmax(logits, -1) @ value


@dataclass(frozen=True)
class Injected:
    """A model that overflows or makes NaN, and where the trace must find it."""

    build: Callable[[], nn.Module]
    modules: tuple[str, ...]
    """The modules, by device: autocast's lists differ by device, and with them where a value is rounded to 16 bits."""
    phase: str
    ops: tuple[str, ...]
    """The ops; their names differ between libraries."""
    kind: str = "inf"
    how: str = "made"
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    loss: LossFunction = nn.functional.mse_loss
    scale: float = 2.0**10
    inputs: float = 1.0
    element: tuple[int, float] | None = None
    """An index into the flattened inputs and the value to put there."""

    def model(self, device: torch.device) -> nn.Module:
        """Build the model, with the same weights on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().to(device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer with a learning rate so small that every iteration computes the same."""
        return torch.optim.SGD(model.parameters(), lr=1e-12)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs (4, 8, 16) and a target of the same shape."""
        generator = torch.Generator().manual_seed(1)
        inputs = self.inputs * torch.randn(4, 8, WIDTH, generator=generator).clamp(-2, 2)
        target = torch.randn(4, 8, WIDTH, generator=generator)
        if self.element is not None:
            inputs.view(-1)[self.element[0]] = self.element[1]
        return inputs.to(device), target.to(device)


def _scaled(factor: float) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(factor)
    return layer


def _between(middle: nn.Module, name: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(WIDTH, WIDTH))
    model.add_module(name, middle)
    model.add_module("last", nn.Linear(WIDTH, WIDTH))
    return model


def _gained(gain: float) -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    nn.init.constant_(norm.weight, gain)
    return norm


def _zeroed(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """`function` of magnitudes of which the first of each row is exactly zero."""
    return Function(lambda inputs: function(inputs.abs() * (torch.arange(WIDTH, device=inputs.device) > 0)))


def _nan_weight() -> nn.Module:
    model = _between(nn.Linear(WIDTH, WIDTH), "middle")
    with torch.no_grad():
        model.middle.weight[3, 5] = float("nan")
    return model


def _chain(*factors: float) -> nn.Module:
    return nn.Sequential(*(_scaled(factor) for factor in factors))


MATRIX = ("addmm", "mm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_addmm_activation")

INJECTED = {
    "attention logits": Injected(
        lambda: _between(Attention(1e6), "attention"), ("attention",), "forward", ("mul", *MATRIX), dtypes=("fp16",)
    ),
    "a layer of 1e5": Injected(
        lambda: _chain(1.0, 1e5, 1e-5), ("1",), "forward", ("_to_copy", *MATRIX), dtypes=("fp16",)
    ),
    "large activations": Injected(lambda: _chain(500.0, 500.0, 1e-5), ("1",), "forward", MATRIX, dtypes=("fp16",)),
    "square in 16 bits": Injected(
        lambda: _between(Function(lambda x: (x * 1000) * x), "square"),
        ("square",),
        "forward",
        ("mul",),
        dtypes=("fp16",),
        inputs=100.0,
    ),
    "cast of a large norm": Injected(
        lambda: _between(_gained(1e5), "norm"),
        ("norm", "last"),
        "forward",
        ("_to_copy", "native_layer_norm", "layer_norm"),
        dtypes=("fp16",),
    ),
    "log of zero": Injected(lambda: _between(_zeroed(torch.log), "log"), ("log",), "forward", ("log",)),
    "root of zero": Injected(
        lambda: _between(_zeroed(torch.sqrt), "root"), ("root",), "backward", ("div", "mul", "reciprocal")
    ),
    "log of zero hidden by where": Injected(
        lambda: _between(_zeroed(lambda x: torch.where(x > 0, torch.log(x), x)), "guarded"),
        ("guarded",),
        "backward",
        ("div",),
        kind="NaN",
    ),
    "0/0": Injected(
        lambda: _between(Function(lambda x: (x - x) / (x - x).sum(-1, keepdim=True)), "share"),
        ("share",),
        "forward",
        ("div",),
        kind="NaN",
    ),
    "exponentials": Injected(
        lambda: _between(Function(lambda x: (x * 1000).exp() / (x * 1000).exp().sum(-1, keepdim=True)), "softmax"),
        ("softmax",),
        "forward",
        ("exp",),
    ),
    "a row that is all masked": Injected(
        lambda: _between(Attention(all_masked=True), "attention"),
        ("attention",),
        "forward",
        ("_softmax", "softmax"),
        kind="NaN",
    ),
    "division in the loss": Injected(
        lambda: _between(nn.ReLU(), "act"),
        ("",),
        "loss",
        ("div",),
        loss=lambda output, target: (output.float() - target).pow(2).sum() / (target > 1e6).sum(),
    ),
    "inf in the batch": Injected(
        lambda: _between(nn.ReLU(), "act"),
        ("",),
        "forward",
        ("the batch's inputs",),
        how="given",
        element=(77, float("inf")),
    ),
    "NaN in a weight": Injected(_nan_weight, ("",), "forward", ("the weight middle.weight",), kind="NaN", how="given"),
    "a loss scale too large": Injected(
        lambda: _chain(1.0, 100.0, 1.0), ("1",), "backward", MATRIX, dtypes=("fp16",), scale=2.0**16
    ),
    "gradients of one sign": Injected(
        lambda: nn.Sequential(Function(torch.abs), _scaled(1.0)),
        ("",),
        "backward",
        ("_to_copy",),
        dtypes=("fp16",),
        loss=lambda output, target: output.float().sum(),
        scale=2.0**24,
    ),
    "a loss scale beyond the range": Injected(
        lambda: _between(nn.ReLU(), "act"), ("",), "backward", ("_to_copy",), dtypes=("fp16",), scale=2.0**40
    ),
}


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (1, WIDTH)),
        nn.Flatten(0, 1),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.GELU(),
        nn.Conv1d(4, 1, 3, padding=1),
        nn.Unflatten(0, (4, 8)),
        nn.Flatten(2),
    )


CLEAN = {
    "perceptron": Injected(lambda: _between(nn.GELU(), "act"), (), "", ()),
    "masked attention": Injected(lambda: _between(Attention(), "attention"), (), "", ()),
    "convolutions": Injected(_convolutions, (), "", ()),
    "norms and softmax": Injected(
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LogSoftmax(-1), nn.Linear(WIDTH, WIDTH)),
        (),
        "",
        (),
    ),
    "an infinity that where leaves out": Injected(
        lambda: _between(_zeroed(lambda x: torch.where(x > 0, x.detach().log(), x)), "guarded"), (), "", ()
    ),
    "the largest of float16": Injected(lambda: _chain(100.0, 300.0, 1e-4), (), "", (), scale=1.0),
}
