"""Float64 updates that take whole tensors: factored, orthogonalized and sparse ones, and LBFGS, as documented."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Options = Mapping[str, Any]


def adafactor(parameter: Tensor, gradient: Tensor, step: int, state: State, options: Options) -> Tensor:
    """One step of Adafactor over a float64 tensor of any rank. Source: torch.optim.Adafactor, algorithm box.

    `options["eps"]` holds two numbers: None, which the documentation defines by the type, is for the caller to fill in.
    """
    first, second = options["eps"]
    rate, limit = options.get("lr", 1e-2), options.get("d", 1.0)
    gradient = -gradient if options.get("maximize") else gradient
    share = step ** options.get("beta2_decay", -0.8)
    size = max(second, _rms(parameter)) * min(rate, step**-0.5)
    parameter = parameter * (1 - rate * options.get("weight_decay", 0.0))
    square = gradient**2
    if gradient.dim() > 1:
        rows = _mixed(state, "rows", square.mean(-1, keepdim=True), share)
        columns = _mixed(state, "columns", square.mean(-2, keepdim=True), share)
        estimate = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=first)
    else:
        estimate = _mixed(state, "squares", square, share)
    update = gradient / estimate.clamp(min=first**2).sqrt()
    return parameter - size / max(1.0, _rms(update) / limit) * update


def muon(parameter: Tensor, gradient: Tensor, step: int, state: State, options: Options) -> Tensor:
    """One step of Muon over a float64 matrix, its iteration in float64 too. Source: torch.optim.Muon, algorithm box."""
    rate, momentum = options.get("lr", 1e-3), options.get("momentum", 0.95)
    mean = _mixed(state, "mean", gradient, 1 - momentum)
    update = gradient + momentum * (mean - gradient) if options.get("nesterov", True) else mean
    rows, columns = update.shape
    x = update.T if rows > columns else update
    x = x / x.norm().clamp(min=options.get("eps", 1e-7))
    a, b, c = options.get("ns_coefficients", (3.4445, -4.775, 2.0315))
    for _ in range(options.get("ns_steps", 5)):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    sizes = {
        None: math.sqrt(max(1.0, rows / columns)),
        "original": math.sqrt(max(1.0, rows / columns)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
    }
    shrunk = parameter * (1 - rate * options.get("weight_decay", 0.1))
    return shrunk - rate * sizes[options.get("adjust_lr_fn")] * (x.T if rows > columns else x)


def sparse_adam(parameter: Tensor, gradient: Tensor, step: int, state: State, options: Options) -> Tensor:
    """One step of SparseAdam: the moments and the elements of rows that the gradient names alone.

    Source: torch.optim.SparseAdam: "a masked version of the Adam algorithm"; the step counts for all rows.
    """
    gradient = (-gradient if options.get("maximize") else gradient).coalesce()
    first, second = options.get("betas", (0.9, 0.999))
    rows, values = gradient.indices()[0], gradient.values()
    mean = state.setdefault("mean", torch.zeros_like(parameter))
    square = state.setdefault("square", torch.zeros_like(parameter))
    mean[rows] = first * mean[rows] + (1 - first) * values
    square[rows] = second * square[rows] + (1 - second) * values**2
    rate = options.get("lr", 1e-3) * math.sqrt(1 - second**step) / (1 - first**step)
    changed = parameter.clone()
    changed[rows] -= rate * mean[rows] / (square[rows].sqrt() + options.get("eps", 1e-8))
    return changed


def lbfgs(start: Tensor, slope: Callable[[Tensor], Tensor], rate: float, history: int) -> Iterator[Tensor]:
    """Yield the points of L-BFGS with steps of a fixed size from a flat float64 tensor, without end.

    `slope` is the gradient at a point. The first step is shortened by the sum of the gradient's magnitudes, and a pair
    without curvature is not kept. Source: torch.optim.LBFGS, after minFunc (Schmidt 2005).
    """
    point, gradient = start, slope(start)
    pairs: list[tuple[Tensor, Tensor]] = []
    step = -gradient * rate * min(1.0, 1 / float(gradient.abs().sum()))
    while True:
        point = point + step
        yield point
        turned = slope(point) - gradient
        gradient = gradient + turned
        if float(turned @ step) > 1e-10:
            pairs = [*pairs, (step, turned)][-history:]
        step = -rate * _inverse_times(pairs, gradient)


def _inverse_times(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """Return the estimate of the inverse Hessian times a gradient, by the recursion's definition over its pairs."""
    step, turned = pairs[-1]
    inverse = torch.eye(gradient.numel(), dtype=torch.float64) * (step @ turned) / (turned @ turned)
    for step, turned in pairs:
        left = torch.eye(gradient.numel(), dtype=torch.float64) - torch.outer(step, turned) / (step @ turned)
        inverse = left @ inverse @ left.T + torch.outer(step, step) / (step @ turned)
    return inverse @ gradient


def _rms(x: Tensor) -> float:
    return float(x.norm()) / math.sqrt(x.numel())


def _mixed(state: State, name: str, value: Tensor, share: float) -> Tensor:
    """Move an average that began at zero towards a value, by that share of the way."""
    state[name] = state.get(name, torch.zeros_like(value)) * (1 - share) + share * value
    found: Tensor = state[name]
    return found
