"""Learning rates of torch's schedulers by the formulas of their documentation, in Python's own numbers.

Each function returns the rate of one group after `t` calls of `step()`, for the group's initial rate `base`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

Shape = Literal["cos", "linear"]


def step_rate(base: float, t: int, step_size: int, gamma: float) -> float:
    """Of `StepLR`: times gamma after every `step_size` steps."""
    return float(base * gamma ** (t // step_size))


def multi_step_rate(base: float, t: int, milestones: Sequence[int], gamma: float) -> float:
    """Of `MultiStepLR`: times gamma at each milestone, twice where one is named twice."""
    return float(base * gamma ** sum(milestone <= t for milestone in milestones))


def constant_rate(base: float, t: int, factor: float, total_iters: int) -> float:
    """Of `ConstantLR`: times `factor` until `total_iters` steps were made."""
    return base * factor if t < total_iters else base


def linear_rate(base: float, t: int, start: float, end: float, total_iters: int) -> float:
    """Of `LinearLR`: times a factor that goes from `start` to `end` in equal steps."""
    return base * (start + (end - start) * min(t, total_iters) / total_iters)


def polynomial_rate(base: float, t: int, total_iters: int, power: float) -> float:
    """Of `PolynomialLR`: to 0 by a power of what is left."""
    return float(base * (1 - min(t, total_iters) / total_iters) ** power)


def cosine_rate(base: float, t: float, t_max: float, least: float) -> float:
    """Of `CosineAnnealingLR`: half a cosine to the least rate, and back."""
    return least + (base - least) * (1 + math.cos(math.pi * t / t_max)) / 2


def restarted_cosine_rate(base: float, t: int, first: int, times: int, least: float) -> float:
    """Of `CosineAnnealingWarmRestarts`: half a cosine again and again, each `times` as long as the one before."""
    period = first
    while t >= period:
        t, period = t - period, period * times
    return cosine_rate(base, t, period, least)


def cyclic_place(t: int, up: int, down: int) -> tuple[int, float]:
    """Return the cycle of `CyclicLR`, from 1, and how far between the bounds the rate is, 1 at the upper one."""
    cycle, place = divmod(t, up + down)
    return cycle + 1, place / up if place <= up else (up + down - place) / down


def between(start: float, end: float, share: float, shape: Shape) -> float:
    """Return what is `share` of the way from `start` to `end`, along half a cosine or a line."""
    gone = (1 - math.cos(math.pi * share)) / 2 if shape == "cos" else share
    return start + (end - start) * gone


def one_cycle(t: int, ends: Sequence[float], values: Sequence[float], shape: Shape) -> float:
    """Return a value of `OneCycleLR`: `values` are those at step 0 and at the `ends` of the phases."""
    start = 0.0
    for number, end in enumerate(ends):
        if t <= end:
            return between(values[number], values[number + 1], (t - start) / (end - start), shape)
        start = end
    return values[-1]


def averaged_rate(base: float, t: int, rate: float, epochs: int, shape: Shape) -> float:
    """Of `SWALR`: from the initial rate to `rate` in `epochs` steps, then constant."""
    return between(base, rate, min(t / epochs, 1.0) if epochs else 1.0, shape)


def plateau_rates(
    base: float,
    losses: Sequence[float],
    better: Callable[[float, float], bool],
    factor: float,
    patience: int,
    cooldown: int,
    least: float,
) -> list[float]:
    """Return the rates of `ReduceLROnPlateau` after each loss; `better` compares a loss with the best one."""
    rates, rate, best, bad, rest = [], base, losses[0], 0, 0
    for number, loss in enumerate(losses):
        if number == 0 or better(loss, best):
            best, bad = loss, 0
        else:
            bad += 1
        if rest:
            rest, bad = rest - 1, 0
        if bad > patience:
            rate, bad, rest = max(rate * factor, least), 0, cooldown
        rates.append(rate)
    return rates
