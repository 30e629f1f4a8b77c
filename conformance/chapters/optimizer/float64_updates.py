"""Float64 updates of the optimizers that have a fused implementation, written from their documented algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# One element: (parameter, gradient, number of the step from 1, state of the element, arguments) -> parameter.
Update = Callable[[float, float, int, dict[str, float], Mapping[str, Any]], float]


def sgd(parameter: float, gradient: float, step: int, state: dict[str, float], options: Mapping[str, Any]) -> float:
    """One step of SGD with momentum, dampening, Nesterov and weight decay. Source: torch.optim.SGD, algorithm box."""
    gradient = _signed(gradient, options) + options.get("weight_decay", 0.0) * parameter
    if momentum := options.get("momentum", 0.0):
        state["buffer"] = (
            momentum * state["buffer"] + (1 - options.get("dampening", 0.0)) * gradient if step > 1 else gradient
        )
        gradient = gradient + momentum * state["buffer"] if options.get("nesterov") else state["buffer"]
    return float(parameter - options["lr"] * gradient)


def adam(parameter: float, gradient: float, step: int, state: dict[str, float], options: Mapping[str, Any]) -> float:
    """One step of Adam; weight decay is added to the gradient. Source: torch.optim.Adam, algorithm box."""
    gradient = _signed(gradient, options) + options.get("weight_decay", 0.0) * parameter
    return parameter - _adam_change(gradient, step, state, options)


def adamw(parameter: float, gradient: float, step: int, state: dict[str, float], options: Mapping[str, Any]) -> float:
    """One step of AdamW; weight decay shrinks the parameter first. Source: torch.optim.AdamW, algorithm box."""
    parameter *= 1 - options.get("lr", 1e-3) * options.get("weight_decay", 1e-2)
    return parameter - _adam_change(_signed(gradient, options), step, state, options)


def adagrad(parameter: float, gradient: float, step: int, state: dict[str, float], options: Mapping[str, Any]) -> float:
    """One step of Adagrad with decaying rate. Source: torch.optim.Adagrad, algorithm box."""
    gradient = _signed(gradient, options) + options.get("weight_decay", 0.0) * parameter
    rate = options["lr"] / (1 + (step - 1) * options.get("lr_decay", 0.0))
    state["sum"] = state.get("sum", options.get("initial_accumulator_value", 0.0)) + gradient**2
    return float(parameter - rate * gradient / (math.sqrt(state["sum"]) + options.get("eps", 1e-10)))


UPDATES: Mapping[str, Update] = {"SGD": sgd, "Adam": adam, "AdamW": adamw, "Adagrad": adagrad}


def steps(name: str, parameter: float, gradients: Iterable[float], options: Mapping[str, Any]) -> list[float]:
    """Return one element's value after each step on those gradients; `options` are the constructor's arguments."""
    state: dict[str, float] = {}
    values = []
    for step, gradient in enumerate(gradients, 1):
        parameter = UPDATES[name](parameter, gradient, step, state, options)
        values.append(parameter)
    return values


def _signed(gradient: float, options: Mapping[str, Any]) -> float:
    return -gradient if options.get("maximize") else gradient


def _adam_change(gradient: float, step: int, state: dict[str, float], options: Mapping[str, Any]) -> float:
    first, second = options.get("betas", (0.9, 0.999))
    state["mean"] = first * state.get("mean", 0.0) + (1 - first) * gradient
    state["square"] = second * state.get("square", 0.0) + (1 - second) * gradient**2
    square = state["square"]
    if options.get("amsgrad"):
        square = state["largest"] = max(state.get("largest", 0.0), square)
    mean = state["mean"] / (1 - first**step)
    spread = math.sqrt(square / (1 - second**step)) + options.get("eps", 1e-8)
    return float(options.get("lr", 1e-3) * mean / spread)
