"""What a user can pass as a number to GradScaler, by the way that it is passed, and what the rules make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...scaler import model as oracle

# The settings of a scaler that a trial starts from: it grows after two clean iterations in a row.
START: Mapping[str, Any] = {
    "scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "_growth_tracker": 0,
}
# The settings of a scaler that a state is loaded into, of which every one differs.
OTHER: Mapping[str, Any] = {"init_scale": 32.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5}
# Clean iterations and ones with inf, so that growth, backoff and the count after a backoff all happen.
PATTERN = "..!..."

_NOT_NUMBERS = ("2.0", [2.0], {"value": 2.0})


@dataclass(frozen=True)
class Values:
    """Values of one kind for one argument; `valid` ones can be put in force, others must be refused."""

    argument: str
    kind: str
    valid: bool
    values: tuple[Any, ...]

    @property
    def id(self) -> str:
        return f"{self.argument.removeprefix('_')}-{self.kind}"


# A scale of which the reciprocal is not a finite fp32 number cannot be divided by; a factor of growth that is not above
# 1 does not grow, one of backoff outside (0, 1) does not back off to a usable scale; an interval counts iterations.
KINDS = (
    Values("scale", "floats", True, (3.0, 0.5, 2.0**-100, 2.0**100)),
    Values("scale", "ints", True, (2, 2**31, 2**62)),
    Values("scale", "0-dim tensors", True, (torch.tensor(2.0), torch.tensor(0.5, dtype=torch.float64))),
    Values("scale", "negative", True, (-2.0, -0.5)),  # the sign cancels
    Values("scale", "zero", False, (0.0, -0.0, 5e-324)),
    Values("scale", "too small to invert", False, (1e-45, 2.0**-140)),
    Values("scale", "NaN", False, (math.nan,)),
    Values("scale", "infinite", False, (math.inf, -math.inf)),
    Values("scale", "beyond fp32", False, (1e39, -1e39)),
    Values("scale", "tensors of one dimension", False, (torch.tensor([2.0, 3.0]), torch.ones(0))),
    Values("scale", "not numbers", False, _NOT_NUMBERS),
    Values("growth_factor", "floats", True, (1.5, 2.0**40, math.nextafter(1.0, 2.0))),
    Values("growth_factor", "ints", True, (2, 3, 2**64)),
    Values("growth_factor", "0-dim tensors", True, (torch.tensor(1.5), torch.tensor(3))),
    Values("growth_factor", "not above 1", False, (1.0, 0.5, True, 1)),
    Values("growth_factor", "zero", False, (0.0, 0, False)),
    Values("growth_factor", "negative", False, (-2.0, -0.5, -1, -math.inf)),
    Values("growth_factor", "NaN", False, (math.nan,)),
    Values("growth_factor", "infinite", False, (math.inf,)),
    Values("growth_factor", "tensors of one dimension", False, (torch.tensor([2.0]),)),
    Values("growth_factor", "not numbers", False, (*_NOT_NUMBERS, None)),
    Values("backoff_factor", "floats", True, (0.25, 2.0**-20, math.nextafter(1.0, 0.0))),
    Values("backoff_factor", "0-dim tensors", True, (torch.tensor(0.25), torch.tensor(0.5, dtype=torch.float64))),
    Values("backoff_factor", "not below 1", False, (1.0, 2.0, 1, True, math.inf)),
    Values("backoff_factor", "zero", False, (0.0, 0, False)),
    Values("backoff_factor", "negative", False, (-0.5, -2, -math.inf)),
    Values("backoff_factor", "NaN", False, (math.nan,)),
    Values("backoff_factor", "tensors of one dimension", False, (torch.tensor([0.5]),)),
    Values("backoff_factor", "not numbers", False, (*_NOT_NUMBERS, None)),
    Values("growth_interval", "ints", True, (1, 3, 1000, 2**40)),
    Values("growth_interval", "0-dim tensors", True, (torch.tensor(3),)),
    Values("growth_interval", "zero", False, (0,)),
    Values("growth_interval", "negative", False, (-1, -(2**31))),
    Values("growth_interval", "fractions", False, (1.5, 0.5, math.nan, math.inf)),
    Values("growth_interval", "not numbers", False, (*_NOT_NUMBERS, None)),
    Values("_growth_tracker", "ints", True, (0, 1)),
    Values("_growth_tracker", "0-dim tensors", True, (torch.tensor(1),)),
    Values("_growth_tracker", "negative", False, (-1, -5)),
    Values("_growth_tracker", "fractions", False, (0.5, 1.5)),
    Values("_growth_tracker", "infinite", False, (math.inf, math.nan)),
    Values("_growth_tracker", "not numbers", False, (*_NOT_NUMBERS, None)),
)


def constructed(device_type: str, argument: str, value: Any) -> torch.amp.GradScaler:
    """Return a scaler of the start settings that was constructed with the value."""
    settings = {name: number for name, number in START.items() if name != "_growth_tracker"} | {argument: value}
    settings["init_scale"] = settings.pop("scale")
    return torch.amp.GradScaler(device_type, **settings)


def _new(device_type: str) -> torch.amp.GradScaler:
    return constructed(device_type, "scale", START["scale"])


def _other(device_type: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device_type, **OTHER)


def _used(make: Callable[[str], torch.amp.GradScaler], device_type: str) -> torch.amp.GradScaler:
    scaler = make(device_type)
    scaler.scale(torch.ones((), device=device_type))
    return scaler


def _set(scaler: torch.amp.GradScaler, argument: str, value: Any) -> None:
    getattr(scaler, f"set_{argument}")(value)


def _load(scaler: torch.amp.GradScaler, argument: str, value: Any) -> None:
    scaler.load_state_dict({**START, argument: value})


@dataclass(frozen=True)
class Route:
    """A way to pass a number to a scaler: which arguments it takes, on what scaler, by what call."""

    name: str
    arguments: tuple[str, ...]
    start: Callable[[str], torch.amp.GradScaler] | None
    call: Callable[[torch.amp.GradScaler, str, Any], object]


ROUTES = (
    Route("constructor", tuple(START)[:4], None, lambda scaler, argument, value: None),
    Route("setter", tuple(START)[1:4], _new, _set),
    Route("load", tuple(START), _other, _load),
    Route("load-in-use", tuple(START), partial(_used, _other), _load),
    Route("update", ("scale",), partial(_used, _new), lambda scaler, argument, value: scaler.update(value)),
)


@dataclass(frozen=True)
class Trial:
    """How a value ended: refused by the call or by the first scale(), refused later, or trained with."""

    refused: Exception | None = None
    late: str | None = None
    changed: bool = False
    scales: tuple[float, ...] = ()
    moved: tuple[float, ...] = ()


def tried(route: Route, device_type: str, argument: str, value: Any) -> Trial:
    """Pass the value on the route, then train over PATTERN with gradients of 1 and a rate of 1."""
    if isinstance(value, torch.Tensor) and route.name == "update":
        value = value.to(device_type)
    scaler = route.start(device_type) if route.start is not None else None
    before = None if scaler is None else scaler.state_dict()
    try:
        if scaler is None:
            scaler = constructed(device_type, argument, value)
        route.call(scaler, argument, value)
    except Exception as error:
        return Trial(refused=error, changed=scaler is not None and scaler.state_dict() != before)
    try:
        scaler.scale(torch.ones((), device=device_type))
    except Exception as error:  # nothing was trained: the scale tensors are made here
        return Trial(refused=error)
    seen = []
    try:
        for letter in PATTERN:
            seen.append(_iterate(scaler, device_type, math.inf if letter == "!" else 1.0))
    except Exception as error:
        return Trial(late=f"{type(error).__name__} in iteration {len(seen) + 1}: {error}")
    return Trial(scales=tuple(scale for scale, _ in seen), moved=tuple(way for _, way in seen))


def _iterate(scaler: torch.amp.GradScaler, device_type: str, slope: float) -> tuple[float, float]:
    """Run one iteration; return the scale after it and the way that the parameter went."""
    parameter = torch.nn.Parameter(torch.zeros((), device=device_type))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter * 1.0).backward()
    if not math.isfinite(slope):
        parameter.grad = torch.full_like(parameter, slope)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), float(parameter.detach())


def expected(argument: str, value: Any) -> Trial:
    """Return how training with the value goes by the documented rules."""
    settings = {**START, argument: float(value)}
    return Trial(scales=tuple(_scales(settings)), moved=tuple(0.0 if letter == "!" else -1.0 for letter in PATTERN))


def _scales(settings: Mapping[str, float]) -> Iterator[float]:
    scale, count = oracle.rounded(settings["scale"], oracle.FP32), settings["_growth_tracker"]
    for letter in PATTERN:
        count = 0 if letter == "!" else count + 1
        if letter == "!":
            scale = oracle.rounded(scale * settings["backoff_factor"], oracle.FP32)
        elif count == settings["growth_interval"]:
            grown, count = oracle.rounded(scale * settings["growth_factor"], oracle.FP32), 0
            scale = grown if math.isfinite(grown) else scale
        yield scale
