"""Random histories of GradScaler calls, and the first call at which a real scaler departs from the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import hypothesis.strategies as st
import torch

from conformance.oracles.grad_scaler import FP32, Gradient, GradScalerModel, rounded

Call: TypeAlias = tuple[Any, ...]
"""The name of one of the methods of `_Pair` and its arguments."""

OPTIMIZERS = 2
GRADIENTS = 2

# What an iteration is usually made of; the rest is drawn from every call there is, legal there or not.
_USUAL: tuple[tuple[Call, ...], ...] = (
    (("step", 0),),
    (("step", 0), ("step", 1)),
    (("unscale_", 0), ("step", 0)),
    (("unscale_", 1), ("unscale_", 0), ("step", 0), ("step", 1)),
    (("unscale_", 1), ("step", 0)),
)
# Moderate numbers: how a finite gradient that overflows in unscaling is treated is a contract of its own.
_NUMBERS = (0.0, -0.0, 1.0, -3.0, 0.1, 65504.0, -1e4, 2.0**-24, 2.0**-126)
_BAD = (float("inf"), float("-inf"), float("nan"))
_SCALES = (65536.0, 1.0, 3.0, 0.1, 2.0**-10, 2.0**100)


@dataclass(frozen=True)
class History:
    """A scaler's settings and the calls that follow."""

    settings: dict[str, Any]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Departure:
    """The call at which the real scaler and the model no longer agree, and what each of them shows."""

    calls: tuple[Call, ...]
    seen: str
    expected: str


def histories(iterations: int = 10) -> st.SearchStrategy[History]:
    """Return a strategy for histories of up to `iterations` iterations, with two optimizers."""
    settings = st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from((*_SCALES, 2.0**126)),
            "growth_factor": st.sampled_from((2.0, 1.5, 1.25, 10.0)),
            "backoff_factor": st.sampled_from((0.5, 0.25, 0.75)),
            "growth_interval": st.integers(1, 4),
        }
    )
    calls = st.lists(_iteration(), min_size=1, max_size=iterations)
    return st.builds(lambda settings, parts: History(settings, tuple(chain(*parts))), settings, calls)


def _iteration() -> st.SearchStrategy[tuple[Call, ...]]:
    numbers = st.sampled_from(_NUMBERS)
    clean = st.tuples(*[numbers] * GRADIENTS)
    dirty = st.permutations((1.0, *_BAD)).map(lambda values: tuple(values[:GRADIENTS]))
    gradients = st.tuples(*[st.one_of(clean, clean, dirty)] * OPTIMIZERS)
    which = st.integers(0, OPTIMIZERS - 1)
    scales = st.sampled_from(_SCALES)
    anything = st.one_of(
        st.tuples(st.sampled_from(("step", "unscale_")), which),
        st.tuples(st.sampled_from(("update_to", "update_to_tensor")), scales),
        st.tuples(st.just("set_growth_factor"), st.sampled_from((1.25, 4.0))),
        st.tuples(st.just("set_backoff_factor"), st.sampled_from((0.75, 0.125))),
        st.tuples(st.just("set_growth_interval"), st.integers(1, 4)),
        st.sampled_from((("update",), ("save",), ("load",), ("pickle",), ("deepcopy",))),
    )
    usual = st.sampled_from(_USUAL)
    body = st.one_of(usual, usual, st.lists(anything, max_size=5).map(tuple))
    end = st.sampled_from(((("update",),), (("update",),), (("update",),), ()))
    extra = st.lists(anything, max_size=1).map(tuple)
    return st.tuples(gradients, numbers, body, end, extra).map(
        lambda drawn: (("backward", drawn[0]), ("scale", drawn[1]), *drawn[2], *drawn[3], *drawn[4])
    )


def departure(history: History, device: torch.device) -> Departure | None:
    """Play `history` on a real scaler for `device` and on the model; return where they part, if they do."""
    pair = _Pair(history.settings, device)
    for count, (name, *arguments) in enumerate(history.calls, 1):
        real, model = getattr(pair, name)(*arguments)
        seen = f"{_outcome(real)}; {pair.real_state()}"
        expected = f"{_outcome(model)}; {pair.model_state()}"
        if seen != expected:
            return Departure(history.calls[:count], seen, expected)
    return None


Twin: TypeAlias = tuple[Callable[[], Any], Callable[[], Any]]
"""The same call on the real scaler and on the model."""


class _Pair:
    """A real scaler and a model side by side, each with its optimizers (SGD, learning rate 1)."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, **settings)
        self.model = GradScalerModel(**settings)
        self.parameters = [
            [torch.zeros((), device=device, requires_grad=True) for _ in range(GRADIENTS)] for _ in range(OPTIMIZERS)
        ]
        self.optimizers = [torch.optim.SGD(parameters, lr=1.0) for parameters in self.parameters]
        self.expected_parameters = [[0.0] * GRADIENTS for _ in range(OPTIMIZERS)]
        self.expected_gradients = [[0.0] * GRADIENTS for _ in range(OPTIMIZERS)]
        self.saved = (self.scaler.state_dict(), self.model.state_dict())

    def real_state(self) -> str:
        numbers = [
            (parameter.item(), None if parameter.grad is None else parameter.grad.item())
            for parameters in self.parameters
            for parameter in parameters
        ]
        return f"{self.scaler.state_dict()}, parameters and gradients {numbers}"

    def model_state(self) -> str:
        numbers = [
            pair
            for parameters, gradients in zip(self.expected_parameters, self.expected_gradients, strict=True)
            for pair in zip(parameters, gradients, strict=True)
        ]
        return f"{self.model.state_dict()}, parameters and gradients {numbers}"

    def backward(self, gradients: tuple[tuple[float, ...], ...]) -> Twin:
        for parameters, values in zip(self.parameters, gradients, strict=True):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = torch.full((), value, device=self.device)
        self.expected_gradients = [[rounded(value, FP32) for value in values] for values in gradients]
        return _nothing, _nothing

    def scale(self, value: float) -> Twin:
        loss = torch.full((), value, device=self.device)
        return lambda: self.scaler.scale(loss).item(), lambda: self.model.scale(loss.item())

    def unscale_(self, which: int) -> Twin:
        def model() -> None:
            self._keep(which, self.model.unscale_(which, self._gradients(which)))

        return lambda: self.scaler.unscale_(self.optimizers[which]), model

    def step(self, which: int) -> Twin:
        def model() -> None:
            step = self.model.step(which, self._gradients(which))
            self._keep(which, step.gradients)
            if step.ran:
                # The difference of two fp32 numbers, rounded to fp64 and then to fp32, is correctly rounded
                # (53 >= 2 * 24 + 2 bits: Figueroa, "When is double rounding innocuous?", 1995).
                self.expected_parameters[which] = [
                    rounded(parameter - gradient, FP32)
                    for parameter, gradient in zip(
                        self.expected_parameters[which], self.expected_gradients[which], strict=True
                    )
                ]

        return lambda: self.scaler.step(self.optimizers[which]), model

    def update(self) -> Twin:
        return self.scaler.update, self.model.update

    def update_to(self, scale: float) -> Twin:
        return lambda: self.scaler.update(scale), lambda: self.model.update(scale)

    def update_to_tensor(self, scale: float) -> Twin:
        new_scale = torch.full((), scale, device=self.device)
        return lambda: self.scaler.update(new_scale), lambda: self.model.update(scale)

    def set_growth_factor(self, factor: float) -> Twin:
        return self._set("growth_factor", factor)

    def set_backoff_factor(self, factor: float) -> Twin:
        return self._set("backoff_factor", factor)

    def set_growth_interval(self, interval: int) -> Twin:
        # An interval that has passed already is a contract of its own.
        return self._set("growth_interval", max(interval, self.model.get_growth_tracker() + 1))

    def save(self) -> Twin:
        self.saved = (self.scaler.state_dict(), self.model.state_dict())
        return _nothing, _nothing

    def load(self) -> Twin:
        real, model = self.saved
        return lambda: self.scaler.load_state_dict(real), lambda: self.model.load_state_dict(model)

    def pickle(self) -> Twin:
        return self._replace(lambda scaler: pickle.loads(pickle.dumps(scaler)))

    def deepcopy(self) -> Twin:
        return self._replace(copy.deepcopy)

    def _replace(self, duplicate: Callable[[Any], Any]) -> Twin:
        def real() -> None:
            self.scaler = duplicate(self.scaler)

        def model() -> None:
            self.model = self.model.copy()

        return real, model

    def _set(self, name: str, value: float) -> Twin:
        return lambda: getattr(self.scaler, f"set_{name}")(value), lambda: setattr(self.model, name, value)

    def _gradients(self, which: int) -> list[Gradient]:
        return [Gradient((value,)) for value in self.expected_gradients[which]]

    def _keep(self, which: int, gradients: list[Gradient]) -> None:
        self.expected_gradients[which] = [gradient.values[0] for gradient in gradients]


def _nothing() -> None:
    return None


def _outcome(call: Callable[[], Any]) -> str:
    """What the call returns, or the type of what it raises, as text, where NaN equals NaN."""
    try:
        return repr(call())
    except Exception as error:
        return type(error).__name__
