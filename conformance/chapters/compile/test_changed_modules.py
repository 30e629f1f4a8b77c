"""Check compiled models whose modules change between calls, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.numbers.formats import FORMATS
from .support import compiling, dtypes_of, inner_type

_SIZE = 4


class _Model(nn.Module):
    """A model with a region inside, which asks for everything that `CHANGES` changes."""

    def __init__(self, device: torch.device, dtype: torch.dtype, other: torch.dtype) -> None:
        super().__init__()
        self.first = _filled(nn.Linear(_SIZE, _SIZE, bias=False), 0)
        self.norm = nn.BatchNorm1d(_SIZE)  # which takes away the scale of `first`, and would take away its bias
        self.linear = _filled(nn.Linear(_SIZE, _SIZE), 1)
        self.drop = nn.Dropout(1.0)
        self.layers = nn.ModuleList([nn.Tanh()])
        self.register_buffer("offset", torch.ones(_SIZE))
        self.region = self.given = dtype
        self.other = other
        self.enabled = True
        self.factor: float | Tensor = 2.0
        self.way = "sum"
        self.options = {"shift": 1.0}
        self.terms = [1.0]
        self.last: nn.Module | None = None
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.region, enabled=self.enabled, cache_enabled=False):
            y = self.linear(self.norm(self.first(x)))
            for layer in self.layers:
                y = layer(y)
        y = y * self.factor + self.offset + self.options["shift"]
        for term in self.terms:
            y = y - term
        if self.way == "product":
            y = y * x
        if self.last is not None:
            y = self.last(y)
        if self.training:
            y = y + 8
        return y + self.drop(x)


def _filled(layer: nn.Linear, shift: int) -> nn.Linear:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((torch.arange(parameter.numel()) + shift).remainder(5).reshape(parameter.shape) / 4 - 0.5)
    return layer


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _mode(model: nn.Module, on: bool) -> None:
    model.train(not on)


def _parametrized(model: Any, on: bool) -> None:
    if on:
        parametrize.register_parametrization(model.linear, "weight", _Doubled())
    elif parametrize.is_parametrized(model.linear):
        parametrize.remove_parametrizations(model.linear, "weight", leave_parametrized=False)


def _own_forward(model: Any, on: bool) -> None:
    if on:
        linear = model.linear
        linear.forward = lambda x: nn.functional.linear(x, linear.weight)
    else:
        model.linear.__dict__.pop("forward", None)


def _layers(model: Any, on: bool) -> None:
    if on:
        model.layers.append(nn.ReLU())
    elif len(model.layers) > 1:
        del model.layers[1]


def _weight(model: Any, on: bool) -> None:
    model.linear.weight = nn.Parameter(torch.full_like(model.linear.weight, 0.5 if on else 0.25))


def _weight_data(model: Any, on: bool) -> None:
    model.linear.weight.data = torch.full_like(model.linear.weight, 0.5 if on else 0.25)


def _weight_in_place(model: Any, on: bool) -> None:
    with torch.no_grad():
        model.linear.weight.fill_(0.5 if on else 0.25)


def _bias(model: Any, on: bool) -> None:
    kept = None if on else nn.Parameter(torch.ones(_SIZE, device=model.linear.weight.device))
    model.linear.bias = kept


def _tied(model: Any, on: bool) -> None:
    model.linear.weight = model.first.weight if on else nn.Parameter(model.first.weight.detach().clone())


def _terms(model: Any, on: bool) -> None:
    model.terms[1:] = [0.5] if on else []


def _set(name: str, off: Any, on: Any) -> Callable[[Any, bool], None]:
    """Set the attribute of that dotted name."""
    *path, last = name.split(".")

    def change(model: Any, changed: bool) -> None:
        for part in path:
            model = getattr(model, part)
        setattr(model, last, on if changed else off)

    return change


CHANGES: Mapping[str, Callable[[Any, bool], None]] = {
    "evaluation": _mode,
    "norm in evaluation": lambda model, on: _mode(model.norm, on),
    "dropout in evaluation": lambda model, on: _mode(model.drop, on),
    "training flag alone": _set("training", True, False),
    "frozen weight": lambda model, on: model.linear.weight.requires_grad_(not on),
    "frozen model": lambda model, on: model.requires_grad_(not on),
    "thawed weight": lambda model, on: model.linear.weight.requires_grad_(on),
    "thawed layer": lambda model, on: model.linear.requires_grad_(on),
    "thawed norm": lambda model, on: model.norm.requires_grad_(on),
    "thawed model": lambda model, on: model.requires_grad_(on),
    "new weight": _weight,
    "data of the weight": _weight_data,
    "weight written in place": _weight_in_place,
    "16-bit weights": lambda model, on: model.linear.to(model.region if on else torch.float32),
    "tied weights": _tied,
    "no bias": _bias,
    "parametrized weight": _parametrized,
    "buffer": lambda model, on: setattr(model, "offset", torch.full_like(model.offset, 3.0 if on else 1.0)),
    "16-bit buffer": lambda model, on: setattr(model, "offset", model.offset.to(model.region if on else torch.float32)),
    "layer appended": _layers,
    "layer replaced": lambda model, on: model.layers.__setitem__(0, nn.ReLU() if on else nn.Tanh()),
    "last module": _set("last", None, nn.Softplus()),
    "forward of a module": _own_forward,
    "number": _set("factor", 2.0, 3.0),
    "number becomes a tensor": _set("factor", 2.0, torch.tensor(3.0)),
    "text": _set("way", "sum", "product"),
    "entry of a dictionary": lambda model, on: model.options.update(shift=2.0 if on else 1.0),
    "list": _terms,
    "dtype of the region": lambda model, on: setattr(model, "region", model.other if on else model.given),
    "region disabled": _set("enabled", True, False),
    "dropout": _set("drop.p", 1.0, 0.0),
    "eps of a norm": _set("norm.eps", 1e-5, 0.5),
    "momentum of a norm": _set("norm.momentum", 0.1, 0.5),
}
"""What makes a change of the model, and undoes it."""
ROUNDINGS = 8
_SHOWN = ("evaluation", "training flag alone", "16-bit weights", "number", "frozen weight", "thawed weight")
_LEVELS = {"eager": ("quick", "standard"), "aot_eager": ("standard", "full")}
CASES = [
    deep(levels[name not in _SHOWN], (backend, name), id=f"{name}-{backend}")
    for name in CHANGES
    for backend, levels in _LEVELS.items()
]


def _called(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Return what a call gives, what its backward gives each parameter, and what it leaves in buffers, or its error."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    try:
        result = call(x)
        result.float().square().sum().backward()
    except Exception as error:
        return {f"raises {type(error).__name__}": x.detach()}
    asked = {"x": x, **dict(model.named_parameters(remove_duplicate=False))}
    grads = {f"gradient of {name}": one.grad for name, one in asked.items() if one.grad is not None}
    return {"result": result.detach(), **grads, **dict(model.named_buffers())}


@contract("AMP-COMPILE-100")
@pytest.mark.parametrize("pair", CASES)
def test_changes_of_a_model(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    backend, name = pair
    x = torch.randint(-2, 3, (8, _SIZE), generator=rng).float().to(target.device)
    for dtype in dtypes_of(case, target):
        plain, subject = (_Model(target.device, dtype, inner_type(target, dtype)) for _ in range(2))
        with compiling(case, backend):
            compiled = torch.compile(subject, backend=backend)
            for turn, on in enumerate((False, True, False, True)):
                for model in (plain, compiled if turn > 1 else subject):
                    CHANGES[name](model, on)
                seen, expected = _called(subject, compiled, x), _called(plain, plain, x)
                what = f"{dtype}: call {turn + 1}, {name}{'' if on else ', undone'}"
                raised = [key for key in expected if key.startswith("raises")]
                case.equal(f"{what}: what eager does (control)", raised, [])
                case.equal(f"{what}: what there is", sorted(seen), sorted(expected))
                for key in [one for one in expected if one in seen]:
                    if backend == "eager":
                        case.identical(f"{what}: {key}", seen[key], expected[key])
                        continue
                    # The graph takes statistics by another op, which may round them otherwise.
                    case.equal(f"{what}: type of {key}", seen[key].dtype, expected[key].dtype)
                    far = normwise_distance(seen[key], expected[key])
                    case.at_most(f"{what}: {key}", far, ROUNDINGS * FORMATS[dtype].unit_roundoff, "normwise")
