"""Check functional_call and stacked models in a region against the modules themselves."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.trace.ops import OpTrace
from .exact_programs import TAIL

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """Two products by one weight, with a ReLU between and a float32 buffer that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.relu(self.first(x)) + self.shift)
        return output


def _model(seed: int, device: torch.device) -> Tied:
    generator = torch.Generator().manual_seed(seed)
    model = Tied()
    with torch.no_grad():
        model.first.weight.copy_((2.0 * torch.randint(0, 2, (3, 3), generator=generator) - 1.0) * (1.0 + TAIL))
    model.to(device)
    model.second.weight = model.first.weight  # moving a module gives some devices a weight for each name
    return model


def _rows(device: torch.device) -> Tensor:
    return (2.0 * torch.randint(0, 2, (4, 3), generator=torch.Generator().manual_seed(5)) - 1.0).to(device) * (1 + TAIL)


def _loss(output: Tensor) -> Tensor:
    return output.float().square().sum()


@contract("AMP-TRANSFORM-008")
def test_functional_call(case: Case, target: Target) -> None:
    rows = _rows(target.device)
    for dtype in case.supported(target):
        model = _model(0, target.device)
        weight = model.first.weight
        with target.autocast(dtype), OpTrace() as plain:
            expected = model(rows)
        (wanted,) = torch.autograd.grad(_loss(expected), weight)
        for tied in (False, True):
            given = {"first.weight": weight}
            what = f"{dtype}, {'one name' if tied else 'both names'} of a shared weight"
            given |= {} if tied else {"second.weight": weight}
            with target.autocast(dtype), OpTrace() as trace:
                seen = torch.func.functional_call(model, given, (rows,), tie_weights=tied)
            case.identical(f"{what}: output", seen, expected)
            case.identical(f"{what}: gradient", torch.autograd.grad(_loss(seen), weight)[0], wanted)
            case.equal(f"{what}: ops", list(map(str, trace.floating)), list(map(str, plain.floating)))
        detached = {"first.weight": weight.detach()}

        def loss(given: dict[str, Tensor], model: Tied = model) -> Tensor:
            return _loss(torch.func.functional_call(model, given, (rows,)))

        with target.autocast(dtype):
            found = torch.func.grad(loss)(detached)["first.weight"]
        case.identical(f"{dtype}: gradient by torch.func.grad", found, wanted)
        other = {"first.weight": -weight.detach()}
        with target.autocast(dtype):
            case.identical(
                f"{dtype}: output of other weights after the model's own",
                torch.func.functional_call(model, other, (rows,)),
                _with(model, other)(rows),
            )
            case.identical(f"{dtype}: output of the model after that", model(rows), expected)
        for kind in case.supported(target):
            _judge_values_of_type(case, target, dtype, model, kind)
        case.true(f"{dtype}: the model keeps its weight", model.second.weight is weight)


def _judge_values_of_type(case: Case, target: Target, dtype: torch.dtype, model: Tied, kind: torch.dtype) -> None:
    """Judge a call with one value, of another type than the module's, for a weight of two names."""
    rows, found = _rows(target.device), []
    values = {"first.weight": (-model.first.weight.detach()).to(kind).requires_grad_()}
    own = _with(model, values)
    for call, weight in (
        (lambda: torch.func.functional_call(model, values, (rows,)), values["first.weight"]),
        (lambda: own(rows), own.first.weight),
    ):
        with target.autocast(dtype), OpTrace() as trace:
            output = call()
        found.append((output.detach(), torch.autograd.grad(_loss(output), weight)[0], trace))
    (seen, gradient, ops), (expected, wanted, plain) = found
    case.identical(f"{dtype}, a weight of {kind}: output", seen, expected)
    case.identical(f"{dtype}, a weight of {kind}: gradient", gradient, wanted)
    case.equal(f"{dtype}, a weight of {kind}: ops", list(map(str, ops.floating)), list(map(str, plain.floating)))


def _with(model: Tied, weights: dict[str, Tensor]) -> Tied:
    made = copy.deepcopy(model)
    made.first.weight = made.second.weight = nn.Parameter(weights["first.weight"])
    return made


class Thrice(nn.Module):
    """Three products by one weight, of which two are in a module inside."""

    def __init__(self, weights: tuple[nn.Parameter, ...]) -> None:
        super().__init__()
        self.inner, self.last = Tied(), nn.Linear(3, 3, bias=False)
        self.inner.to(weights[0].device)
        self.inner.first.weight, self.inner.second.weight, self.last.weight = weights

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.relu(self.inner(x)))
        return output


@contract("AMP-TRANSFORM-008")
def test_every_set_of_names(case: Case, target: Target) -> None:
    """Give a value to each set of the names of one weight: tied, all of them take it, else those of the set."""
    rows = _rows(target.device)
    names = ("inner.first.weight", "inner.second.weight", "last.weight")
    sets = [one for size in (1, 2, 3) for one in itertools.combinations(names, size)]
    for given, tied in itertools.product(sets, (True, False)):
        taken, wrong = names if tied else given, []
        for dtype in case.supported(target):
            own, value = (nn.Parameter(_model(seed, target.device).first.weight.detach()) for seed in (0, 1))
            model = Thrice((own, own, own))
            with target.autocast(dtype):
                wanted = Thrice(tuple(value if name in taken else own for name in names))(rows)
            try:
                with target.autocast(dtype):
                    seen = torch.func.functional_call(model, dict.fromkeys(given, value), (rows,), tie_weights=tied)
            except (KeyError, ValueError) as error:
                wrong.append(f"{dtype}: {error!r}")
                continue
            found, slope = (torch.autograd.grad(_loss(one), value)[0] for one in (seen, wanted))
            pairs = {"output": (seen, wanted), "gradient": (found, slope)}
            wrong += [f"{dtype}: {name}" for name, (one, other) in pairs.items() if not torch.equal(one, other)]
            wrong += [f"{dtype}: {name} of the model" for name in names if model.get_parameter(name) is not own]
        what = f"{len(given)} of 3 names, {'tied' if tied else 'not tied'}: what differs with {' and '.join(given)}"
        case.equal(what, wrong, [])


@contract("AMP-TRANSFORM-009")
def test_stacked_models(case: Case, target: Target) -> None:
    rows = _rows(target.device)
    for dtype in case.supported(target):
        models = [_model(seed, target.device) for seed in range(3)]
        parameters, buffers = torch.func.stack_module_state(models)
        weights = torch.stack([model.first.weight for model in models])
        case.identical(f"{dtype}: stacked weights", parameters["first.weight"], weights)
        base = copy.deepcopy(models[0])

        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], base: nn.Module = base) -> Tensor:
            return torch.func.functional_call(base, (parameters, buffers), (rows,))

        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return _loss(call(parameters, buffers))

        with target.autocast(dtype):
            outputs = [model(rows) for model in models]
        wanted = [
            torch.autograd.grad(_loss(one), model.first.weight)[0] for one, model in zip(outputs, models, strict=True)
        ]
        with target.autocast(dtype), OpTrace() as trace:
            seen = torch.func.vmap(call)(parameters, buffers)
            found = torch.func.vmap(torch.func.grad(loss))(parameters, buffers)
        case.identical(f"{dtype}: outputs", seen, torch.stack(outputs))
        case.identical(f"{dtype}: gradients", found["first.weight"], torch.stack(wanted))
        products = {one for op in trace.computing if op.multiplies for one in op.inputs}
        case.equal(f"{dtype}: types of the operands of products", products, {dtype})
        kinds = filter(target.computes_in, (torch.float32, dtype, torch.float64))
        for kind, trained in itertools.product(kinds, (True, False)):
            what = f"models of {kind}, {'trained' if trained else 'frozen'}: types, and what gets gradients"
            given = [model.to(kind).requires_grad_(trained) for model in copy.deepcopy(models)]
            case.equal(what, _attributes(*torch.func.stack_module_state(given)), _attributes(*_states(given[0])))


@contract("AMP-TRANSFORM-009")
def test_stacked_state_of_several_types(case: Case, target: Target) -> None:
    # Parameters and buffers of a type each, whichever comes first.
    kinds = [torch.int64, *filter(target.computes_in, (torch.float32, torch.float16, torch.bfloat16, torch.float64))]
    for turn in range(len(kinds)):
        turned = kinds[turn:] + kinds[:turn]
        models = [_of_types(turned, start, target.device) for start in range(3)]
        stacked = torch.func.stack_module_state(models)
        states = [_states(model) for model in models]
        for what, given, *each in zip(("parameters", "buffers"), stacked, *states, strict=True):
            for name in each[0]:
                wanted = torch.stack([one[name].detach() for one in each])
                case.identical(f"{turned[0]} first: {what}, {name}", given[name].detach(), wanted)


def _of_types(kinds: Sequence[torch.dtype], start: int, device: torch.device) -> nn.Module:
    model = nn.Module()
    for number, kind in enumerate(kinds):
        value = torch.arange(start, start + 3, device=device).to(kind)
        model.register_buffer(f"buffer{number}", value)
        if kind.is_floating_point:
            model.register_parameter(f"parameter{number}", nn.Parameter(value * 2))
    return model


def _states(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(model.named_parameters()), dict(model.named_buffers())


def _attributes(*states: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (one.dtype, one.requires_grad, one.is_leaf) for state in states for name, one in state.items()}
