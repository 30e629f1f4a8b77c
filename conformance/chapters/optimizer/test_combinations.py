"""Check that optimizers step alike, and leave the gradients alone, under every combination of their arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import largest_share
from ...oracles.optimizer_state import differences, snapshot
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import Draw, parameters_of, stepped, unit, wide
from .support import ALL, demand

# Arguments that switch a term of the update on; the rest is that of the first variant.
CHOICES: dict[str, tuple[Any, Any]] = {
    "weight_decay": (0.0, 0.125),
    "maximize": (False, True),
    "momentum": (0.0, 0.75),
    "dampening": (0.0, 0.5),
    "nesterov": (False, True),
    "amsgrad": (False, True),
    "centered": (False, True),
    "decoupled_weight_decay": (False, True),
}
QUICK = ("SGD", "Adam", "AdamW", "RMSprop")
CHOSEN = tuple(kind for kind in ALL if kind.first and kind.gradients != "sparse" and kind.implementation != "default")


def _depth(kind: OptimizerConfig) -> str:
    return "quick" if kind.optimizer in QUICK else "standard"


KINDS = [deep(_depth(kind), kind, id=f"{kind.optimizer}-{kind.implementation}") for kind in CHOSEN]
# Nesterov's momentum in cases of their own: AMP-OPTIMIZER-121 is waived for one of them.
BY_NESTEROV = [
    deep(_depth(kind), kind, nesterov, id=f"{kind.optimizer}-{kind.implementation}{'-nesterov' * nesterov}")
    for kind in CHOSEN
    for nesterov in ((False, True) if kind.accepts("nesterov") else (False,))
]
# SGD's momentum in cases of its own: AMP-OPTIMIZER-107 is waived for one of them.
BY_MOMENTUM = [
    deep(
        "standard" if kind.optimizer == "AdamW" else _depth(kind),  # it steps by Adam's functions
        kind,
        momentum,
        id=f"{kind.optimizer}-{kind.implementation}{'-momentum' * bool(momentum)}",
    )
    for kind in CHOSEN
    for momentum in ((False, True) if kind.optimizer == "SGD" else (None,))
]
# The steps in which each parameter of an optimizer has a gradient.
ABSENT = {
    "late": ((2, 4), (1, 2, 3, 4), (3, 4)),
    "intermittent": ((1, 3, 4), (), (1, 2, 3, 4), (1, 4)),
}
SHAPES = ((8, 9), (3, 2))
DECOUPLED = ("AdamW", "Muon", "Adafactor")


def combinations(kind: OptimizerConfig) -> Iterator[OptimizerConfig]:
    """Yield the optimizer under every combination of the arguments of CHOICES that its for-loop accepts."""
    names = [name for name in CHOICES if kind.accepts(name)]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        arguments = {**kind.arguments, **dict(zip(names, values, strict=True))}
        if arguments.get("nesterov") and (arguments.get("dampening") or not arguments["momentum"]):
            continue  # SGD refuses them: Nesterov momentum requires a momentum and zero dampening
        yield dataclasses.replace(kind, arguments=MappingProxyType(arguments))


def require(case: Case, target: Target, kind: OptimizerConfig) -> None:
    case.require_arithmetic(target, torch.float32)
    demand(case, kind, target.device)


@contract("AMP-OPTIMIZER-120")
@pytest.mark.parametrize("kind", KINDS)
def test_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    require(case, target, kind)
    draw = Draw(rng, target.device)
    # Muon orthogonalizes in bf16, in products that another device than the float64 run's may round otherwise.
    coarsest = unit(torch.bfloat16) if kind.optimizer == "Muon" and target.device_type != "cpu" else 0.0
    # Muon is left out of 16 bits: it orthogonalizes in bf16, where a rounding grows beyond what bounds a step.
    low = kind.optimizer != "Muon" and target.computes_in(torch.bfloat16)
    types = (torch.float32, torch.bfloat16) if low else (torch.float32,)
    for chosen in combinations(kind):
        optimizer = chosen.make([torch.nn.Parameter(value) for value, _ in draw.pairs(SHAPES, *types)])
        plain = dataclasses.replace(chosen, implementation="for-loop")
        for number in (1, 2):
            give(optimizer, draw)
            step = stepped(plain, optimizer, coarsest)
            case.equal(f"{dict(chosen.arguments)}, step {number}: error", step.raised, None)
            case.equal(f"{dict(chosen.arguments)}, step {number}: distances beyond their bounds", step.beyond, {})


@contract("AMP-OPTIMIZER-107")
@pytest.mark.parametrize("pattern", ABSENT)
@pytest.mark.parametrize(("kind", "momentum"), BY_MOMENTUM)
def test_absent_gradients(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, momentum: bool | None, pattern: str
) -> None:
    """Step parameters with gradients in different steps together, and each alone by a for-loop in its own steps.

    Each of four steps has up to 32 operations in float32, whose errors a moment adds up eightfold.
    """
    require(case, target, kind)
    draw, judged = Draw(rng, target.device), 0
    raised: dict[str, str] = {}
    far: dict[str, float] = {}
    for chosen in combinations(kind):
        if momentum is not None and bool(chosen.arguments["momentum"]) is not momentum:
            continue
        judged += 1
        steps = ABSENT[pattern]
        starts = [draw.value(SHAPES[number % 2]) for number in range(len(steps))]
        slopes = [{step: draw.gradient(tuple(one.shape)) for step in range(1, 5)} for one in starts]
        together = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = chosen.make(together)
        try:
            for step in range(1, 5):
                for parameter, taken, given in zip(together, steps, slopes, strict=True):
                    parameter.grad = given[step].clone() if step in taken else None
                optimizer.step()
        except Exception as error:
            raised[str(dict(chosen.arguments))] = f"step {step}: {error!r:.80}"
            continue
        plain = dataclasses.replace(chosen, implementation="for-loop")
        for number, (seen, start, taken, given) in enumerate(zip(together, starts, steps, slopes, strict=True)):
            alone = torch.nn.Parameter(start.clone())
            own = plain.make([alone])
            for step in taken:
                alone.grad = given[step].clone()
                own.step()
            bound = 4 * 32 * 8 * unit(torch.float32) * (wide(alone).abs() + (wide(alone) - wide(start)).abs())
            share = largest_share(wide(seen) - wide(alone), bound)
            if not share <= 1:
                far[f"{dict(chosen.arguments)}, parameter {number} with gradients in steps {taken}"] = share
    case.at_least("combinations judged", judged, 1)
    case.equal("errors", raised, {})
    case.equal("distances from the parameter alone beyond their bounds", far, {})


@contract("AMP-OPTIMIZER-121")
@pytest.mark.parametrize(("kind", "nesterov"), BY_NESTEROV)
def test_gradients_are_left_alone(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, nesterov: bool
) -> None:
    require(case, target, kind)
    draw = Draw(rng, target.device)
    for chosen in combinations(kind):
        if chosen.arguments.get("nesterov", False) is not nesterov:
            continue
        optimizer = chosen.make([torch.nn.Parameter(value) for value, _ in draw.pairs(SHAPES, torch.float32)])
        what = str(dict(chosen.arguments))
        for number in (1, 2):
            given = give(optimizer, draw)
            optimizer.step()
            kept = [torch.equal(p.grad, one) for p, one in zip(parameters_of(optimizer), given, strict=True)]
            case.equal(f"{what}, step {number}: gradients that are what they were", kept, [True] * len(kept))
            after = snapshot(optimizer)
            for parameter in parameters_of(optimizer):
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan)
            moved = differences(state_of(snapshot(optimizer)), state_of(after))
            case.equal(f"{what}, step {number}: state that changes with the gradient of that step", moved, [])


@contract("AMP-OPTIMIZER-120")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_maximize(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    """Take the steps that minimize takes with gradients of the other sign, dense and sparse ones."""
    case.require_arithmetic(target, torch.float32)
    draw, wrong, judged = Draw(rng, target.device, matrices=True), {}, 0
    for kind in ALL:
        if kind.implementation != implementation or not kind.accepts("maximize"):
            continue
        if not kind.promised_on(target.device_type):
            continue
        value = draw.value((8, 9))
        slopes = [draw.gradient((8, 9)) - 1 for _ in range(2)]
        ends = []
        for maximize in (True, False):
            parameter = torch.nn.Parameter(value.clone())
            optimizer = kind.make([parameter], maximize=maximize)
            for slope in slopes:
                given = slope if maximize else -slope
                parameter.grad = _rows(given) if kind.gradients == "sparse" else given
                optimizer.step()
            ends.append(parameter.detach())
        judged += 1
        if not torch.equal(*ends):
            wrong[kind.id] = float((ends[0] - ends[1]).abs().max())
    if not judged:
        case.unsupported(f"no {implementation} optimizer that maximizes is promised on {target.device_type}")
    case.at_least("optimizers judged", judged, 1)
    case.equal("distances of maximize from minimize with gradients of the other sign", wrong, {})


def _rows(dense: torch.Tensor) -> torch.Tensor:
    """Return every other row as a sparse gradient."""
    rows = torch.arange(0, len(dense), 2, device=dense.device)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), dense[rows], dense.shape)


@contract("AMP-OPTIMIZER-120")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_decoupled_decay(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    """Gradients of zero leave the decay alone: each step multiplies by one less the rate times the decay."""
    case.require_arithmetic(target, torch.float32)
    draw, judged, rate, decay = Draw(rng, target.device), 0, 0.25, 0.125
    for kind in ALL:
        decoupled = kind.optimizer in DECOUPLED or kind.arguments.get("decoupled_weight_decay")
        if kind.implementation != implementation or not decoupled or not kind.promised_on(target.device_type):
            continue
        for lr in (rate, torch.tensor(rate)):
            # Higher than wide and wider than high: Muon adjusts its rate by the shape, and not its decay.
            parameters = [torch.nn.Parameter(draw.value(shape)) for shape in ((8, 2), (2, 8))]
            before = [parameter.detach().clone() for parameter in parameters]
            try:
                optimizer = kind.make(parameters, lr=lr, weight_decay=decay)
            except (RuntimeError, ValueError) as error:  # AMP-OPTIMIZER-105
                case.note(f"{kind.id}, rate {lr}: refused", str(error)[:80])
                continue
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            judged += 1
            for parameter, value in zip(parameters, before, strict=True):
                wanted = wide(value) * (1 - rate * decay) ** 2
                far = float(((wide(parameter) - wanted) / wanted).abs().max())
                # Two products, and a factor that is rounded.
                case.at_most(
                    f"{kind.id}, rate in a {type(lr).__name__}, {tuple(value.shape)}: relative distance",
                    far,
                    4 * 2 * unit(torch.float32),
                )
    if not judged:
        case.unsupported(f"no {implementation} optimizer with decoupled decay is promised on {target.device_type}")


def give(optimizer: torch.optim.Optimizer, draw: Draw) -> list[torch.Tensor]:
    """Give every parameter a new gradient; return copies of them."""
    for parameter in parameters_of(optimizer):
        parameter.grad = draw.gradient(tuple(parameter.shape), parameter.dtype)
    return [parameter.grad.clone() for parameter in parameters_of(optimizer) if parameter.grad is not None]


def state_of(copied: dict[str, Any]) -> dict[str, Any]:
    return {place: value for place, value in copied.items() if place.startswith("state/")}
