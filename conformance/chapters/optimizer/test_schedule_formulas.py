"""Check that schedulers give every group the rates and momenta of their documented formulas."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles import schedules

# Rates of two groups, no multiples of one another, and others to end at.
BASES, ENDS = (0.25, 0.1), (0.03, 0.07)
STEPS = 12
CLOSE = 2.0**-40  # of recurrences of some steps in Python's numbers

Value = Callable[[int, int], float]  # of a group and a number of steps
Make = Callable[..., Any]  # of an optimizer, and of last_epoch where the schedule has it


def _of(formula: Callable[..., float], **options: Any) -> Value:
    return lambda group, t: formula(BASES[group], t, **options)


def _product(group: int, t: int) -> float:
    return BASES[group] * math.prod(1 - 1 / (2 + number) for number in range(1, t + 1))


def _chained(group: int, t: int) -> float:
    return schedules.step_rate(schedules.linear_rate(BASES[group], t, 0.25, 1.0, 5), t, 3, 0.5)


def _in_sequence(group: int, t: int) -> float:
    base = BASES[group]
    return schedules.constant_rate(base, t, 0.5, 6) if t < 4 else schedules.multi_step_rate(base, t - 4, (2, 5), 0.1)


def _in_sequence_after_a_chain(group: int, t: int) -> float:
    base = BASES[group]
    return schedules.constant_rate(base, t, 0.5, 3) * 0.9**t if t < 4 else schedules.constant_rate(base, t - 4, 0.3, 20)


def _in_two_sequences(group: int, t: int) -> float:
    base = BASES[group]
    if t < 5:
        return schedules.constant_rate(base, t, 0.5, 2) if t < 2 else schedules.step_rate(base, t - 2, 1, 0.9)
    return schedules.constant_rate(base, t - 5, 0.3, 20)


def _cyclic(up: int, down: int, size: Callable[[int, int], float]) -> Value:
    """Return the rate of cycles between ENDS and BASES; `size` is of the cycle, from 1, and the step."""

    def value(group: int, t: int) -> float:
        cycle, place = schedules.cyclic_place(t, up, down)
        return ENDS[group] + (BASES[group] - ENDS[group]) * place * size(cycle, t)

    return value


def _one_cycle(phases: tuple[float, ...], shape: schedules.Shape, *, three: bool) -> Value:
    def value(group: int, t: int) -> float:
        first = BASES[group] / 10
        return schedules.one_cycle(t, phases, (first, BASES[group], *([first] if three else []), first / 100), shape)

    return value


def _averaged(epochs: int, shape: schedules.Shape) -> Value:
    return lambda group, t: schedules.averaged_rate(BASES[group], t, ENDS[group], epochs, shape)


FORMULAS: dict[str, tuple[Make, Value]] = {
    "StepLR": (
        lambda o, **at: lr_scheduler.StepLR(o, step_size=3, gamma=0.3, **at),
        _of(schedules.step_rate, step_size=3, gamma=0.3),
    ),
    "MultiStepLR": (
        lambda o, **at: lr_scheduler.MultiStepLR(o, milestones=[2, 5, 5, 9], gamma=0.3, **at),
        _of(schedules.multi_step_rate, milestones=(2, 5, 5, 9), gamma=0.3),
    ),
    "ConstantLR": (
        lambda o, **at: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=4, **at),
        _of(schedules.constant_rate, factor=0.3, total_iters=4),
    ),
    "LinearLR": (
        lambda o, **at: lr_scheduler.LinearLR(o, start_factor=0.2, end_factor=0.7, total_iters=7, **at),
        _of(schedules.linear_rate, start=0.2, end=0.7, total_iters=7),
    ),
    "ExponentialLR": (
        lambda o, **at: lr_scheduler.ExponentialLR(o, gamma=0.7, **at),
        _of(schedules.step_rate, step_size=1, gamma=0.7),
    ),
    "PolynomialLR": (
        lambda o, **at: lr_scheduler.PolynomialLR(o, total_iters=8, power=1.7, **at),
        _of(schedules.polynomial_rate, total_iters=8, power=1.7),
    ),
    "CosineAnnealingLR": (
        lambda o, **at: lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=0.01, **at),
        _of(schedules.cosine_rate, t_max=5, least=0.01),
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o, **at: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.01, **at),
        _of(schedules.restarted_cosine_rate, first=3, times=2, least=0.01),
    ),
    "LambdaLR": (
        lambda o, **at: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t], **at),
        lambda group, t: BASES[group] * (0.9**t if group else 1 / (1 + t)),
    ),
    "MultiplicativeLR": (lambda o, **at: lr_scheduler.MultiplicativeLR(o, lambda t: 1 - 1 / (2 + t), **at), _product),
    "ChainedScheduler": (
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.25, 1.0, 5), lr_scheduler.StepLR(o, 3, gamma=0.5)]
        ),
        _chained,
    ),
    "SequentialLR": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.MultiStepLR(o, [2, 5], 0.1)], milestones=[4]
        ),
        _in_sequence,
    ),
    "SequentialLR after a chain": (
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
                lr_scheduler.ConstantLR(o, 0.3, 20),
            ],
            milestones=[4],
        ),
        _in_sequence_after_a_chain,
    ),
    "SequentialLR of sequences": (
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.SequentialLR(
                    o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
                ),
                lr_scheduler.ConstantLR(o, 0.3, 20),
            ],
            milestones=[5],
        ),
        _in_two_sequences,
    ),
    "SequentialLR from its second": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.StepLR(o, 3, 0.3)], milestones=[0]
        ),
        _of(schedules.step_rate, step_size=3, gamma=0.3),
    ),
    "CyclicLR": (
        lambda o, **at: lr_scheduler.CyclicLR(o, list(ENDS), list(BASES), 2, 3, cycle_momentum=False, **at),
        _cyclic(2, 3, lambda cycle, t: 1.0),
    ),
    "CyclicLR, triangular2": (
        lambda o, **at: lr_scheduler.CyclicLR(
            o, list(ENDS), list(BASES), 2, 2, "triangular2", cycle_momentum=False, **at
        ),
        _cyclic(2, 2, lambda cycle, t: 0.5 ** (cycle - 1)),
    ),
    "CyclicLR, exp_range": (
        lambda o, **at: lr_scheduler.CyclicLR(
            o, list(ENDS), list(BASES), 3, 2, "exp_range", gamma=0.9, cycle_momentum=False, **at
        ),
        _cyclic(3, 2, lambda cycle, t: 0.9**t),
    ),
    "OneCycleLR": (
        lambda o, **at: lr_scheduler.OneCycleLR(
            o, list(BASES), 20, pct_start=0.4, div_factor=10, final_div_factor=100, **at
        ),
        _one_cycle((7, 19), "cos", three=False),
    ),
    "OneCycleLR, three phases": (
        lambda o, **at: lr_scheduler.OneCycleLR(
            o,
            list(BASES),
            13,
            pct_start=0.4,
            anneal_strategy="linear",
            div_factor=10,
            final_div_factor=100,
            three_phase=True,
            **at,
        ),
        _one_cycle((4.2, 8.4, 12), "linear", three=True),
    ),
    "SWALR": (lambda o, **at: SWALR(o, list(ENDS), anneal_epochs=7, **at), _averaged(7, "cos")),
    "SWALR, linear": (
        lambda o, **at: SWALR(o, list(ENDS), anneal_epochs=5, anneal_strategy="linear", **at),
        _averaged(5, "linear"),
    ),
    "SWALR at once": (lambda o, **at: SWALR(o, list(ENDS), anneal_epochs=0, **at), _averaged(0, "cos")),
}


# Schedules by whose steps a rate is multiplied, whatever it is: each can follow another.
CHAINABLE = ("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "MultiplicativeLR")


def _grouped(target: Target, kind: str = "SGD") -> torch.optim.Optimizer:
    """Return an optimizer with a group for each of the rates."""
    groups: list[dict[str, Any]] = []
    for rate in BASES:
        parameter = torch.nn.Parameter(torch.ones(2, device=target.device))
        parameter.grad = torch.ones_like(parameter)
        groups.append({"params": [parameter], "lr": rate})
    return torch.optim.AdamW(groups) if kind == "AdamW" else torch.optim.SGD(groups, momentum=0.5)


def _stepped(
    optimizer: torch.optim.Optimizer, make: Make, read: Callable[[dict[str, Any]], float]
) -> list[list[float]]:
    """Return what `read` finds in each group at first and after each of the steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ChainedScheduler and SequentialLR call step() of deprecated form
        schedule = make(optimizer)
        found = [[read(group) for group in optimizer.param_groups]]
        for _ in range(STEPS):
            optimizer.step()
            schedule.step()
            found.append([read(group) for group in optimizer.param_groups])
    return found


def _far(seen: list[list[float]], wanted: Value) -> dict[str, tuple[float, float]]:
    return {
        f"group {group}, step {t}": (value, exact)
        for t, values in enumerate(seen)
        for group, value in enumerate(values)
        if not abs(value - (exact := wanted(group, t))) <= CLOSE
    }


@contract("AMP-OPTIMIZER-131")
def test_rates(case: Case, target: Target) -> None:
    for name, (make, wanted) in FORMULAS.items():
        seen = _stepped(_grouped(target), make, lambda group: float(group["lr"]))
        case.equal(f"{name}: rates that are not those of the formula", _far(seen, wanted), {})


@contract("AMP-OPTIMIZER-131")
def test_rates_after_another_schedule(case: Case, target: Target) -> None:
    """CyclicLR and OneCycleLR are given their first rates: what another schedule has left is no part of them."""
    for name, (make, wanted) in FORMULAS.items():
        if name.startswith(("CyclicLR", "OneCycleLR")):
            optimizer = _grouped(target)
            other = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.25)
            optimizer.step()
            other.step()
            first, *seen = _stepped(optimizer, make, lambda group: float(group["lr"]))
            far = _far(seen, lambda group, t, wanted=wanted: wanted(group, t + 1))  # type: ignore[misc]
            case.equal(f"{name}: first rates that are not those of the formula", _far([first], wanted), {})
            case.equal(f"{name}: later rates that are not those of the formula", far, {})


# ChainedScheduler and SequentialLR go on by their state_dict alone.
RESUMED = [name for name in FORMULAS if not name.startswith(("ChainedScheduler", "SequentialLR"))]
STARTS = (3, 8, 4, 1, 7, 2, 5, 6)


def _saved(target: Target, make: Make, start: int) -> dict[str, Any]:
    """Return the state of an optimizer after so many steps of a schedule."""
    optimizer = _grouped(target)
    schedule = make(optimizer)
    for _ in range(start):
        optimizer.step()
        schedule.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


def _unlike_count(optimizer: torch.optim.Optimizer, schedule: Any, wanted: Value) -> dict[str, tuple[float, float]]:
    """Step both to the last of the steps; return the rates that are not those of the schedule's count."""
    first = schedule.last_epoch
    seen = [[float(group["lr"]) for group in optimizer.param_groups]]
    while first + len(seen) <= STEPS:
        optimizer.step()
        schedule.step()
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
    return _far(seen, lambda group, t: wanted(group, first + t))


@contract("AMP-OPTIMIZER-131")
@pytest.mark.parametrize("name", [name for name in RESUMED if not name.startswith("OneCycleLR")])
def test_rates_from_a_later_epoch(case: Case, target: Target, name: str) -> None:
    """Make a schedule with last_epoch, then load the optimizer: the rates are those of the schedule's count.

    OneCycleLR reads its largest rate from the optimizer's state, which is not loaded yet.
    """
    make, wanted = FORMULAS[name]
    for start in STARTS[: case.samples(quick=2, standard=4, full=8)]:
        optimizer = _grouped(target)
        for group, base in zip(optimizer.param_groups, BASES, strict=True):
            group["initial_lr"] = base
        schedule = make(optimizer, last_epoch=start - 1)
        optimizer.load_state_dict(_saved(target, make, start))
        found = _unlike_count(optimizer, schedule, wanted)
        case.equal(f"after {start} steps: rates that are not those of the schedule's count", found, {})


@contract("AMP-OPTIMIZER-131")
def test_meaning_of_last_epoch(case: Case, target: Target) -> None:
    """Make every schedule over an optimizer that has loaded its state, with last_epoch in one of its two meanings.

    The rate in the state is that of last_epoch, or the one after it: either is a choice, if it is that of all.
    """
    unlike: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    for before, found in unlike.items():
        for name in RESUMED:
            if name.startswith(("CosineAnnealingWarmRestarts", "SWALR")):
                continue  # of these last_epoch is another number in the checks above
            make, wanted = FORMULAS[name]
            for start in STARTS[: case.samples(quick=2, standard=4, full=8)]:
                optimizer = _grouped(target)
                optimizer.load_state_dict(_saved(target, make, start))
                schedule = make(optimizer, last_epoch=start - before)
                if wrong := _unlike_count(optimizer, schedule, wanted):
                    found[f"{name}, {start} steps"] = next(iter(wrong.items()))
    fewest = min(unlike.values(), key=len)
    case.equal("schedules with other rates than those of their count, in the meaning that most have", fewest, {})


@contract("AMP-OPTIMIZER-131")
def test_chained_rates(case: Case, target: Target) -> None:
    """Step two schedules after one another: each goes on from the rate that the other has left."""
    for name, other in itertools.permutations(CHAINABLE, 2):
        optimizer = _grouped(target)
        schedules_of_both = [FORMULAS[one][0](optimizer) for one in (name, other)]
        seen = [[float(group["lr"]) for group in optimizer.param_groups]]
        for _ in range(STEPS):
            optimizer.step()
            for schedule in schedules_of_both:
                schedule.step()
            seen.append([float(group["lr"]) for group in optimizer.param_groups])

        def wanted(group: int, t: int, name: str = name, other: str = other) -> float:
            return FORMULAS[name][1](group, t) * FORMULAS[other][1](group, t) / BASES[group]

        case.equal(f"{name}, then {other}: rates that are not the product", _far(seen, wanted), {})


@contract("AMP-OPTIMIZER-131")
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_momenta(case: Case, target: Target, kind: str) -> None:
    """Cycle the momentum against the rate: in CyclicLR and OneCycleLR, of SGD and of Adam's first beta."""
    low, high = 0.6, 0.9

    def momentum(group: dict[str, Any]) -> float:
        return float(group["momentum"] if kind == "SGD" else group["betas"][0])

    def cyclic(group: int, t: int) -> float:
        return high - (high - low) * schedules.cyclic_place(t, 2, 3)[1]

    def one(group: int, t: int) -> float:
        return schedules.one_cycle(t, (7, 19), (high, low, high), "cos")

    momenta = {"base_momentum": low, "max_momentum": high}
    made: dict[str, tuple[Make, Value]] = {
        "CyclicLR": (lambda o: lr_scheduler.CyclicLR(o, list(ENDS), list(BASES), 2, 3, **momenta), cyclic),
        "OneCycleLR": (lambda o: lr_scheduler.OneCycleLR(o, list(BASES), 20, pct_start=0.4, **momenta), one),
    }
    for name, (make, wanted) in made.items():
        seen = _stepped(_grouped(target, kind), make, momentum)
        case.equal(f"{name}: momenta that are not those of the formula", _far(seen, wanted), {})


LOSSES = (1.0, 0.9, 0.95, 0.91, 0.8999, 0.85, 0.9, 0.9, 0.9, 0.9, 0.9, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)
BETTER: dict[str, tuple[dict[str, Any], Callable[[float, float], bool]]] = {
    "min, rel": ({"mode": "min", "threshold": 0.01}, lambda loss, best: loss < best * (1 - 0.01)),
    "min, abs": ({"mode": "min", "threshold": 0.04, "threshold_mode": "abs"}, lambda loss, best: loss < best - 0.04),
    "max, rel": ({"mode": "max", "threshold": 0.05}, lambda loss, best: loss > best * (1 + 0.05)),
    "max, abs": ({"mode": "max", "threshold": 0.04, "threshold_mode": "abs"}, lambda loss, best: loss > best + 0.04),
}


@contract("AMP-OPTIMIZER-131")
def test_plateaus(case: Case, target: Target) -> None:
    """Lower the rate where the loss did not improve, in each mode, with a cooldown and a least rate."""
    for name, (options, better) in BETTER.items():
        optimizer = _grouped(target)
        schedule = lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=1, cooldown=2, min_lr=list(ENDS), **options
        )
        seen = []
        for loss in LOSSES:
            optimizer.step()
            schedule.step(loss)
            seen.append([float(group["lr"]) for group in optimizer.param_groups])
        wanted = [
            schedules.plateau_rates(base, LOSSES, better, factor=0.3, patience=1, cooldown=2, least=least)
            for base, least in zip(BASES, ENDS, strict=True)
        ]
        case.equal(f"{name}: rates that are not those of the formula", _far(seen, _listed(wanted)), {})


def _listed(values: list[list[float]]) -> Value:
    return lambda group, t: values[group][t]
