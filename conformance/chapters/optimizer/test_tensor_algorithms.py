"""Check the optimizers whose updates take whole tensors against their documented algorithms in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from .support import ALL, demand
from .tensor_updates import State, adafactor, lbfgs, muon, sparse_adam

# Settings under which every term shows: gradients below and above the thresholds, tall, wide and square tensors.
ADAFACTOR: tuple[dict[str, Any], ...] = (
    {"lr": 0.25},
    {"lr": 0.25, "beta2_decay": -0.5, "eps": (2.0**-6, 0.5), "d": 1.0, "weight_decay": 0.125},
    {"lr": 0.75, "d": 1.5, "weight_decay": 0.125, "maximize": True},
)
SHAPES = {"matrix": (4, 6), "batch": (2, 3, 4), "vector": (5,), "column": (6, 1), "single": ()}
# Gradients grow and fall by these between the steps, so that updates are clipped and averages of squares matter.
SIZES = (1.0, 2.0**-6, 4.0, 0.25, 2.0**-10, 16.0)
MUON: tuple[dict[str, Any], ...] = (
    {"lr": 0.25},
    {"lr": 0.25, "momentum": 0.5, "nesterov": False, "weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"},
    # Without decay, which is most of the way otherwise: a look ahead in place of the average leads twice the bound off.
    {"lr": 0.25, "momentum": 0.25, "nesterov": False, "weight_decay": 0.0},
    {"lr": 0.25, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5)},
)
# Normwise, of the way: roundings of sums, and of powers and roots of them, in float32.
SINGLE = 2.0**-14
# Of the way of Muon, whose iteration is in bfloat16: a rounding of it in each of 15 products, some amplified.
HALF = 2.0**-4
# Of the start: curvatures are differences of gradients, which lose a few bits near the minimum.
OF_THE_START = 2.0**-13


def _histories(rng: torch.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Draw for each shape a value and gradients of it, without zeros."""

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return (torch.rand(shape, generator=rng) + 0.25) * (torch.randint(0, 2, shape, generator=rng) * 2 - 1)

    return {name: (drawn(shape), [drawn(shape) * size for size in SIZES]) for name, shape in shapes.items()}


def _distance(seen: Tensor, path: list[Tensor]) -> float:
    """Return how far a parameter is from the end of its path, of the length of the path."""
    way = sum(float((b - a).norm()) for a, b in itertools.pairwise(path))
    return float((seen.detach().cpu().double() - path[-1]).norm()) / way


def _far(
    target: Target,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    exact: Callable[[Tensor, Tensor, int, State], Tensor],
    histories: dict[str, tuple[Tensor, list[Tensor]]],
    bound: float,
) -> dict[str, float]:
    """Step over all histories at once; return the distances from the ways of `exact` that are beyond the bound."""
    parameters = [torch.nn.Parameter(value.clone().to(target.device)) for value, _ in histories.values()]
    optimizer = make(parameters)
    for slopes in zip(*(gradients for _, gradients in histories.values()), strict=True):
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope.to(target.device)
        optimizer.step()
    found = {}
    for parameter, (name, (value, gradients)) in zip(parameters, histories.items(), strict=True):
        path, state = [value.double()], State()
        for number, gradient in enumerate(gradients, 1):
            path.append(exact(path[-1], gradient.double(), number, state))
        if not (distance := _distance(parameter, path)) <= bound:
            found[name] = distance
    return found


@contract("AMP-OPTIMIZER-132")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_adafactor(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    """Step over tensors of several ranks at once."""
    case.require_arithmetic(target, torch.float32)
    demand(case, next(one for one in ALL if one.optimizer == "Adafactor"), target.device)
    for options in ADAFACTOR:
        make = partial(torch.optim.Adafactor, foreach=implementation == "foreach", **options)
        least, size = options.get("eps", (None, 1e-3))
        eps = (torch.finfo(torch.float32).eps if least is None else least, size)
        exact = partial(adafactor, options={**options, "eps": eps})
        far = _far(target, make, exact, _histories(rng, SHAPES), SINGLE)
        case.equal(f"{options}: distances of the way beyond the bound", far, {})


@contract("AMP-OPTIMIZER-132")
def test_muon(case: Case, target: Target, rng: torch.Generator) -> None:
    if not hasattr(torch.optim, "Muon"):
        case.unsupported("this torch has no Muon")
    case.require_arithmetic(target, torch.float32)
    case.require_arithmetic(target, torch.bfloat16)
    for options in MUON:
        histories = _histories(rng, {"wide": (3, 6), "tall": (6, 2), "square": (4, 4)})
        far = _far(target, partial(torch.optim.Muon, **options), partial(muon, options=options), histories, HALF)
        case.equal(f"{options}: distances of the way beyond the bound", far, {})


@contract("AMP-OPTIMIZER-132")
def test_sparse_adam(case: Case, target: Target, rng: torch.Generator) -> None:
    """Step with rows that are named twice, or not at all, and once with no row."""
    case.require_arithmetic(target, torch.float32)
    named = ((0, 2, 2), (3,), (), (0, 3, 1), (2, 0))
    for options in ({"lr": 0.25, "betas": (0.75, 0.875)}, {"lr": 0.25, "eps": 0.0625, "maximize": True}):
        value, gradients = _histories(rng, {"rows": (5, 3)})["rows"]
        parameter, path, state = torch.nn.Parameter(value.clone().to(target.device)), [value.double()], State()
        optimizer = torch.optim.SparseAdam([parameter], **options)
        for number, (rows, gradient) in enumerate(zip(named, gradients, strict=False), 1):
            places = torch.tensor([rows], dtype=torch.int64)
            sparse = torch.sparse_coo_tensor(places, gradient[: len(rows)], value.shape, check_invariants=False)
            parameter.grad = sparse.to(target.device)
            optimizer.step()
            path.append(sparse_adam(path[-1], sparse.double(), number, state, options))
        case.at_most(f"{options}: distance of the way", _distance(parameter, path), SINGLE)
        kept = parameter.detach().cpu()[4].equal(value[4])
        case.true(f"{options}: a row that no gradient named is as it was", kept)


CURVATURES = (1.0, 2.0, 3.0, 0.5, 0.25, 4.0)
ITERATIONS = 10


def _bowl(target: Target, rng: torch.Generator) -> tuple[Tensor, Tensor, list[torch.nn.Parameter], Any]:
    """Return a quadratic form, a start, two parameters that hold it and the closure of the form over them."""
    form = torch.diag(torch.tensor(CURVATURES)) + 0.125
    start = torch.rand(len(CURVATURES), generator=rng) + 0.5
    parameters = [torch.nn.Parameter(part.clone().to(target.device)) for part in (start[:2], start[2:])]
    there = form.to(target.device)

    def closure() -> Tensor:
        for one in parameters:
            one.grad = None
        x = torch.cat(parameters)
        loss: Tensor = (x * (there * x).sum(1)).sum() / 2
        loss.backward()
        return loss

    return form, start, parameters, closure


@contract("AMP-OPTIMIZER-132")
@pytest.mark.parametrize("history", [1, 2, 100])
def test_lbfgs(case: Case, target: Target, rng: torch.Generator, history: int) -> None:
    """Step twice in each call, without a line search."""
    case.require_arithmetic(target, torch.float32)
    for rate in (1.0, 0.5):
        form, start, parameters, closure = _bowl(target, rng)
        optimizer = torch.optim.LBFGS(parameters, lr=rate, max_iter=2, max_eval=50, history_size=history)
        points = _points(start, form, rate, history)
        far = {}
        for call in range(ITERATIONS // 2):
            optimizer.step(closure)
            wanted = next(points)
            seen = torch.cat(parameters).detach().cpu().double()
            if not (distance := float((seen - wanted).norm() / start.norm())) <= OF_THE_START:
                far[f"call {call}"] = distance
        case.equal(f"rate {rate}: distances beyond the bound, of the start", far, {})


def _points(start: Tensor, form: Tensor, rate: float, history: int) -> Iterator[Tensor]:
    """Return every second point."""
    exact = form.double()
    return itertools.islice(lbfgs(start.double(), lambda x: exact @ x, rate, history), 1, None, 2)


@contract("AMP-OPTIMIZER-132")
def test_lbfgs_with_a_line_search(case: Case, target: Target, rng: torch.Generator) -> None:
    case.require_arithmetic(target, torch.float32)
    for rate in (1.0, 0.25, 8.0):
        _, _, parameters, closure = _bowl(target, rng)
        first = float(closure().detach())
        calls: list[float] = []
        optimizer = torch.optim.LBFGS(parameters, lr=rate, max_iter=60, max_eval=120, line_search_fn="strong_wolfe")

        def counted(closure: Any = closure, calls: list[float] = calls) -> Tensor:
            loss: Tensor = closure()
            calls.append(float(loss.detach()))
            return loss

        returned = optimizer.step(counted)
        case.equal(f"rate {rate}: the loss that step() returns is the first", float(returned.detach()), first)
        last = float(closure().detach())
        case.at_most(f"rate {rate}: the loss of the minimum, of the first", last / first, 2.0**-24)
        case.at_most(f"rate {rate}: evaluations", len(calls), 120)
