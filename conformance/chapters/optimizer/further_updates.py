"""Float64 updates of the optimizers that have no fused implementation, written from their documented algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .float64_updates import Update

State = dict[str, float]
Options = Mapping[str, Any]


def adadelta(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of Adadelta. Source: torch.optim.Adadelta, algorithm box."""
    gradient = _decayed(parameter, gradient, options)
    rho, eps = options.get("rho", 0.9), options.get("eps", 1e-6)
    square = _averaged(state, "square", rho, gradient**2)
    change = math.sqrt(state.get("changes", 0.0) + eps) / math.sqrt(square + eps) * gradient
    _averaged(state, "changes", rho, change**2)
    return float(parameter - options.get("lr", 1.0) * change)


def adamax(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of Adamax. Source: torch.optim.Adamax, algorithm box."""
    gradient = _decayed(parameter, gradient, options)
    first, second = options.get("betas", (0.9, 0.999))
    mean = _averaged(state, "mean", first, gradient)
    largest = max(second * state.get("largest", 0.0), abs(gradient) + options.get("eps", 1e-8))
    state["largest"] = largest
    return float(parameter - options.get("lr", 2e-3) * mean / ((1 - first**step) * largest))


def asgd(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of averaged SGD, with its average in the state. Source: torch.optim.ASGD, whose lambd decays."""
    rate, decay = options.get("lr", 1e-2), options.get("lambd", 1e-4)
    gradient = _decayed(parameter, gradient, options)
    eta = rate / (1 + decay * rate * (step - 1)) ** options.get("alpha", 0.75) if step > 1 else rate
    parameter = parameter * (1 - decay * eta) - eta * gradient
    weight = 1 / max(1.0, step - 1 - options.get("t0", 1e6)) if step > 1 else 1.0
    state["average"] = state.get("average", 0.0) + (parameter - state.get("average", 0.0)) * weight
    return float(parameter)


def nadam(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of NAdam. Source: torch.optim.NAdam, algorithm box."""
    parameter, gradient = _decayed_or_decoupled(parameter, gradient, options, 2e-3)
    first, second = options.get("betas", (0.9, 0.999))
    now, then = (first * (1 - 0.5 * 0.96 ** (t * options.get("momentum_decay", 4e-3))) for t in (step, step + 1))
    product = state["product"] = state.get("product", 1.0) * now
    mean = _averaged(state, "mean", first, gradient)
    square = _averaged(state, "square", second, gradient**2)
    ahead = then * mean / (1 - product * then) + (1 - now) * gradient / (1 - product)
    spread = math.sqrt(square / (1 - second**step)) + options.get("eps", 1e-8)
    return float(parameter - options.get("lr", 2e-3) * ahead / spread)


def radam(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of RAdam. Source: torch.optim.RAdam, algorithm box."""
    parameter, gradient = _decayed_or_decoupled(parameter, gradient, options, 1e-3)
    first, second = options.get("betas", (0.9, 0.999))
    mean = _averaged(state, "mean", first, gradient) / (1 - first**step)
    square = _averaged(state, "square", second, gradient**2)
    most = 2 / (1 - second) - 1
    length = most - 2 * step * second**step / (1 - second**step)
    if length > 5:
        rectified = math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length))
        mean *= rectified * math.sqrt(1 - second**step) / (math.sqrt(square) + options.get("eps", 1e-8))
    return float(parameter - options.get("lr", 1e-3) * mean)


def rmsprop(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of RMSprop. Source: torch.optim.RMSprop, algorithm box."""
    gradient = _decayed(parameter, gradient, options)
    alpha = options.get("alpha", 0.99)
    square = _averaged(state, "square", alpha, gradient**2)
    if options.get("centered"):
        square -= _averaged(state, "mean", alpha, gradient) ** 2
    change = gradient / (math.sqrt(square) + options.get("eps", 1e-8))
    if momentum := options.get("momentum", 0.0):
        change = state["buffer"] = momentum * state.get("buffer", 0.0) + change
    return float(parameter - options.get("lr", 1e-2) * change)


def rprop(parameter: float, gradient: float, step: int, state: State, options: Options) -> float:
    """One step of Rprop. Source: torch.optim.Rprop, algorithm box."""
    gradient = -gradient if options.get("maximize") else gradient
    lower, higher = options.get("etas", (0.5, 1.2))
    least, most = options.get("step_sizes", (1e-6, 50))
    turned = gradient * state.get("previous", 0.0)
    factor = higher if turned > 0 else lower if turned < 0 else 1.0
    size = state["size"] = min(max(state.get("size", float(options.get("lr", 1e-2))) * factor, least), most)
    state["previous"] = gradient = 0.0 if turned < 0 else gradient
    return float(parameter - math.copysign(size, gradient) * (gradient != 0))


FURTHER: Mapping[str, Update] = MappingProxyType(
    {
        "ASGD": asgd, "Adadelta": adadelta, "Adamax": adamax, "NAdam": nadam, "RAdam": radam, "RMSprop": rmsprop,
        "Rprop": rprop,
    }
)  # fmt: skip


def _averaged(state: State, name: str, share: float, value: float) -> float:
    state[name] = share * state.get(name, 0.0) + (1 - share) * value
    return state[name]


def _decayed(parameter: float, gradient: float, options: Options) -> float:
    return (-gradient if options.get("maximize") else gradient) + float(options.get("weight_decay", 0.0)) * parameter


def _decayed_or_decoupled(parameter: float, gradient: float, options: Options, rate: float) -> tuple[float, float]:
    if options.get("decoupled_weight_decay"):
        shrunk = parameter * (1 - float(options.get("lr", rate)) * float(options.get("weight_decay", 0.0)))
        return shrunk, -gradient if options.get("maximize") else gradient
    return parameter, _decayed(parameter, gradient, options)
