"""Check that learning-rate schedulers work through the scaler as without one."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, flat, snapshot
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .optimizer_configs import OptimizerConfig
from .support import BOTH, build, iterate, twins


@contract("AMP-OPTIMIZER-072")
@BOTH
def test_scheduled_rates(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    schedules = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in (optimizer, plain)]
    scaler = torch.amp.GradScaler(target.device_type)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            slope = slopes.draw(rng)
            iterate(optimizer, slopes.loss(slope), scaler)
            iterate(plain, twin.loss(slope))
            for schedule in schedules:
                schedule.step()
    complaints = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    case.equal("warnings about the order of scheduler and optimizer", complaints, [])
    case.equal("learning rates after three clean steps", schedules[0].get_last_lr(), [kind.arguments["lr"] / 8] * 2)
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(plain)), [])


def scheduled(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, overflows: Iterable[bool]
) -> tuple[lr_scheduler.StepLR, list[str]]:
    """Step optimizer and scheduler in the documented order, once per item, a skip where it is true.

    Returns the scheduler and the warnings of the iterations that speak of schedulers.
    """
    slopes = LinearLoss.make("dense", target.device, rng)
    optimizer = build(case, kind, slopes)
    schedule = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler(target.device_type)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for overflow in overflows:
            slope = slopes.draw(rng)
            iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", math.inf) if overflow else slope), scaler)
            schedule.step()
    return schedule, [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]


@contract("AMP-OPTIMIZER-073")
@BOTH
def test_scheduler_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    schedule, complaints = scheduled(case, target, rng, kind, overflows=[True])
    case.note("warnings when a scheduler steps after a skipped first step", len(complaints))
    case.note("learning rate after it, relative to the first", schedule.get_last_lr()[0] / kind.arguments["lr"])


@contract("AMP-OPTIMIZER-114")
@BOTH
def test_warnings_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    _, complaints = scheduled(case, target, rng, kind, overflows=[True, False])
    case.equal("warnings of a wrong order where the order is right", [one[:80] for one in complaints], [])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.75),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.125, max_lr=0.5, step_size_up=2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=1), lr_scheduler.StepLR(o, step_size=2, gamma=0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.StepLR(o, step_size=2, gamma=0.5)]
    ),
}  # fmt: skip

SHALLOW = ("StepLR", "OneCycleLR", "ReduceLROnPlateau")


def schedulers() -> list[str]:
    """Return the names of the non-abstract schedulers of this torch."""
    return [
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and value is not lr_scheduler.LRScheduler
        and not name.startswith("_")
    ]


@contract("AMP-OPTIMIZER-076")
@BOTH
@pytest.mark.parametrize(
    "name", [*SHALLOW, *(deep("standard", name, id=name) for name in SCHEDULERS if name not in SHALLOW)]
)
def test_schedulers(case: Case, target: Target, rng: torch.Generator, name: str, kind: OptimizerConfig) -> None:
    """Step the scheduler only if the scale was not lowered, as users do: that is, if the step was taken."""
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedules = [SCHEDULERS[name](one) for one in (optimizer, plain)]
        scaler = torch.amp.GradScaler(target.device_type, growth_interval=2)
        metric = {"metrics": 1.0} if name == "ReduceLROnPlateau" else {}
        seen, expected = [], []
        for bad in (math.nan, None, None, math.inf, None, None, -math.inf, None):
            slope, before = slopes.draw(rng), scaler.get_scale()
            if bad is not None and kind.fused and optimizer.state == {}:
                continue  # AMP-OPTIMIZER-022: fused SGD uses uninitialised momentum after a skipped first step
            iterate(optimizer, slopes.loss(slope if bad is None else with_nonfinite(slope, "last", bad)), scaler)
            if scaler.get_scale() >= before:
                schedules[0].step(**metric)
            if bad is None:
                iterate(plain, twin.loss(slope))
                schedules[1].step(**metric)
            seen.append([group["lr"] for group in optimizer.param_groups])
            expected.append([group["lr"] for group in plain.param_groups])
    complaints = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    case.equal("warnings about the order of scheduler and optimizer", complaints, [])
    case.equal("learning rates after each iteration, against a run on the clean ones", seen, expected)
    counted = [getattr(schedule, "last_epoch", None) for schedule in schedules]  # ChainedScheduler does not count
    case.equal("steps that the scheduler counted", counted[0], counted[1])
    case.equal("differences from that run", differences(snapshot(optimizer), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-076")
def test_every_scheduler_is_known(case: Case) -> None:
    case.equal("schedulers of the table that this torch lacks", sorted(set(SCHEDULERS) - set(schedulers())), [])
    case.note("schedulers that are not checked", sorted(set(schedulers()) - set(SCHEDULERS)))


@contract("AMP-OPTIMIZER-108")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_in_tensors(case: Case, target: Target, name: str) -> None:
    """Compare the rates of a schedule over a tensor with those over a number, and look what happens to the tensor."""
    number, tensor = (_with_rate(target, rate) for rate in (0.25, torch.tensor(0.25, dtype=torch.float64)))
    held = tensor.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ChainedScheduler and SequentialLR call step() of deprecated form
        schedules = [SCHEDULERS[name](one) for one in (number, tensor)]
        metric = {"metrics": 1.0} if name == "ReduceLROnPlateau" else {}
        seen, expected, returned, then = [], [], [], []
        for _ in range(6):
            for one, schedule in zip((number, tensor), schedules, strict=True):
                one.step()
                schedule.step(**metric)
            seen.append(float(tensor.param_groups[0]["lr"]))
            expected.append(number.param_groups[0]["lr"])
            returned.append(schedules[1].get_last_lr()[0])
            then.append(float(returned[-1]))
    far = [abs(ours - theirs) for ours, theirs in zip(seen, expected, strict=True)]
    # Rates are kept in float64 or, where a schedule makes a tensor of its own, in float32.
    case.at_most("distance of the rates from those over a number", max(far), 2.0**-20)
    case.true("param_groups holds the tensor that the constructor was given", tensor.param_groups[0]["lr"] is held)
    later = [float(rate) for rate in returned]
    case.equal(
        "values of get_last_lr() that later steps have changed",
        [a for a, b in zip(then, later, strict=True) if a != b],
        [],
    )


def _with_rate(target: Target, rate: float | torch.Tensor) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2, device=target.device))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=rate, foreach=False)


# Schedulers that count what the rates show only later.
COUNTING: dict[str, Callable[[Any], Any]] = {
    "ReduceLROnPlateau, patient": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, factor=0.5),
    "ReduceLROnPlateau, with a cooldown": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=2),
    "ReduceLROnPlateau, of a maximum": lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.125, anneal_epochs=4),
    "SWALR, linear": lambda o: swa_utils.SWALR(o, swa_lr=0.0625, anneal_epochs=3, anneal_strategy="linear"),
    "CosineAnnealingWarmRestarts, longer": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=1, T_mult=2),
}
METRICS = (1.0, 0.5, 0.625, 0.75, 0.5, 0.875)


def _through_a_file(states: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return what torch.load makes of the file by default, for numbers, tensors and containers alone."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded: tuple[dict[str, Any], ...] = torch.load(file)
    return loaded


@contract("AMP-OPTIMIZER-127")
@pytest.mark.parametrize("into", ["the_same", "new_ones", "new_ones_from_a_file"])
def test_rates_go_on(case: Case, target: Target, into: str) -> None:
    """Load the states of an optimizer and its scheduler in training: rates and momentum are those without it."""

    def settings(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        group = optimizer.param_groups[0]
        return group["lr"], group["momentum"]

    wrong: dict[str, list[Any]] = {}
    changed: dict[str, list[str]] = {}
    rated = {**SCHEDULERS, **COUNTING}
    for name, make in rated.items():
        rates: list[list[Any]] = []
        for loads in (False, True):
            optimizer = _with_rate(target, 0.25)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as above
                schedule = make(optimizer)
                rates.append([settings(optimizer)])
                for number, metric in enumerate(METRICS):
                    optimizer.step()
                    schedule.step(**({"metrics": metric} if name.startswith("ReduceLROnPlateau") else {}))
                    rates[-1].append(settings(optimizer))
                    if loads and number % 2:
                        states = (optimizer.state_dict(), schedule.state_dict())
                        try:
                            saved = _through_a_file(states) if into.endswith("file") else copy.deepcopy(states)
                        except pickle.UnpicklingError as error:
                            rates[-1].append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                            break
                        if into != "the_same":
                            optimizer = _with_rate(target, 0.25)
                            schedule = make(optimizer)
                        before = flat({"states": saved})
                        optimizer.load_state_dict(saved[0])
                        schedule.load_state_dict(saved[1])
                        rates[-1][-1] = settings(optimizer)
                        changed.setdefault(name, []).extend(differences(flat({"states": saved}), before))
        if rates[0] != rates[1]:
            wrong[name] = rates[1]
    case.equal("rates and momentum that are not those of training without a checkpoint", wrong, {})
    for name in rated:
        case.equal(f"{name}: how loading changes the state that it is given", changed.get(name, []), [])


# Losses whose differences 16 bits do not hold: 2**-12 of their size, beside a threshold of 1e-4.
FALLING = tuple(1 - number / 4096 for number in range(9))


@contract("AMP-OPTIMIZER-072")
@pytest.mark.parametrize("place", ["in", "outside"])
def test_losses_in_tensors(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    """Lower the rate of ReduceLROnPlateau after losses in tensors when it is lowered after their numbers."""
    for losses in (FALLING, FALLING[::-1]):
        optimizers = [_with_rate(target, 0.25) for _ in range(2)]
        schedules = [lr_scheduler.ReduceLROnPlateau(one, patience=1, factor=0.5) for one in optimizers]
        rates: list[list[float]] = [[], []]
        for loss in losses:
            for one, schedule, seen in zip(optimizers, schedules, rates, strict=True):
                one.step()
                metric = loss if one is optimizers[0] else torch.tensor(loss, device=target.device)
                with target.autocast(amp_dtype, enabled=place == "in"):
                    schedule.step(metric)
                seen.append(one.param_groups[0]["lr"])
        case.equal(f"rates after losses from {losses[0]} to {losses[-1]}", rates[1], rates[0])
