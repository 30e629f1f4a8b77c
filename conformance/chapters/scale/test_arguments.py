"""Check that GradScaler refuses the numbers, devices, states and containers that it cannot use, and uses all others."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .argument_values import KINDS, ROUTES, START, Route, Trial, Values, expected, tried
from .support import RESUMED, has_xla, started

CLEAR = (TypeError, ValueError, AssertionError, RuntimeError)  # the classes of an error that a caller can act on


def _grid(valid: bool) -> pytest.MarkDecorator:
    cells = [
        pytest.param(route, values, id=f"{route.name}-{values.id}".replace(" ", "-"))
        for route in ROUTES
        for values in KINDS
        if values.valid is valid and values.argument in route.arguments
    ]
    return pytest.mark.parametrize(("route", "values"), cells)


def said(trial: Trial) -> str:
    """Describe how a value ended."""
    if trial.refused is not None:
        return f"{type(trial.refused).__name__}{', after the state had changed' if trial.changed else ''}"
    if trial.late is not None:
        return f"refused after training began, by {trial.late}"
    return f"trained: scales {list(trial.scales)}, steps {list(trial.moved)}"


def sampled(case: Case, rng: torch.Generator, values: Values) -> tuple[Any, ...]:
    """Return the values, at the level quick a random one of them: those of one kind end alike."""
    if case.level != "quick":
        return values.values
    return (values.values[int(torch.randint(len(values.values), (), generator=rng))],)


@contract("AMP-SCALE-180")
@_grid(valid=True)
def test_valid_numbers(case: Case, target: Target, rng: torch.Generator, route: Route, values: Values) -> None:
    case.require_arithmetic(target, torch.float64)
    for value in sampled(case, rng, values):
        trial = tried(route, target.device_type, values.argument, value)
        what = f"{values.argument}={value!r} by {route.name}"
        case.equal(f"training with {what}", said(trial), said(expected(values.argument, value)))


@contract("AMP-SCALE-181")
@_grid(valid=False)
def test_invalid_numbers(case: Case, target: Target, rng: torch.Generator, route: Route, values: Values) -> None:
    case.require_arithmetic(target, torch.float64)
    for value in sampled(case, rng, values):
        trial = tried(route, target.device_type, values.argument, value)
        what = f"{values.argument}={value!r} by {route.name}"
        refused = isinstance(trial.refused, CLEAR) and not trial.changed
        case.true(f"{what} is refused before anything changes", refused, said(trial))
    if case.level != "quick":
        control = tried(route, target.device_type, values.argument, START[values.argument])
        case.equal("control: scales with the start settings", control.scales, expected("scale", 8.0).scales)


@contract("AMP-SCALE-182")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
@pytest.mark.parametrize("missing", START)
def test_missing_entry_is_named(case: Case, target: Target, use: bool, missing: str) -> None:
    scaler = started(target) if use else torch.amp.GradScaler(target.device_type)
    error = refusal_without(scaler, missing)
    case.true(f"a state without {missing} is refused by name", missing in str(error), repr(error))
    scaler.load_state_dict(dict(RESUMED))
    case.equal("control: state after a complete one was loaded", scaler.state_dict(), RESUMED)


@contract("AMP-SCALE-182")
@pytest.mark.parametrize("missing", START)
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_incomplete_state(case: Case, target: Target, use: bool, missing: str) -> None:
    scaler = started(target) if use else torch.amp.GradScaler(target.device_type)
    before = scaler.state_dict()
    refusal_without(scaler, missing)
    case.equal(f"state after a state without {missing} was refused", scaler.state_dict(), before)


def refusal_without(scaler: torch.amp.GradScaler, missing: str) -> Exception | None:
    """Load a state without the entry `missing`; return the error that refuses it."""
    try:
        scaler.load_state_dict({name: value for name, value in RESUMED.items() if name != missing})
    except Exception as raised:
        return raised
    return None


# Devices

TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "meta", "privateuseone")
SPELLINGS: Mapping[str, tuple[Any, ...]] = {
    "types": TYPES,
    "indexed": ("cpu:0", "cuda:0", "xpu:1"),
    "devices": (torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0), torch.device("meta")),
    "unknown": ("gpu", "foo", "", "CPU"),
    "not devices": (None, 3, 1.0, ["cpu"]),
}


def made(device: Any, enabled: bool) -> Any:
    """Construct a scaler, without the warning that there is no such device; return it or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.amp.GradScaler(device, enabled=enabled)
        except Exception as error:
            return error


@contract("AMP-SCALE-183")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda name: name.replace(" ", "-"))
def test_devices(case: Case, target: Target, spelling: str, enabled: bool) -> None:
    for device in SPELLINGS[spelling]:
        scaler = made(device, enabled) if spelling == "types" else without_cuda(device, enabled)
        if spelling in ("unknown", "not devices"):
            refused = isinstance(scaler, CLEAR)
            case.true(f"GradScaler({device!r}, enabled={enabled}) is refused", refused, repr(scaler))
            continue
        if spelling != "types" and isinstance(scaler, CLEAR):
            case.note(f"GradScaler({device!r}, enabled={enabled})", repr(scaler))
            continue
        case.true(f"GradScaler({device!r}) is constructed", isinstance(scaler, torch.amp.GradScaler), repr(scaler))
        there = has_xla() or (spelling == "types" and torch.cuda.is_available())
        wanted = enabled and (there or torch.device(device).type != "cuda")
        case.equal(f"GradScaler({device!r}, enabled={enabled}) is enabled", scaler.is_enabled(), wanted)
        expect_usable(case, target, device, scaler)


def without_cuda(device: Any, enabled: bool) -> Any:
    """Construct a scaler where CUDA is not available, for which GradScaler("cuda") disables itself."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return made(device, enabled)


def expect_usable(case: Case, target: Target, device: Any, scaler: torch.amp.GradScaler) -> None:
    """Expect a clean step and a skipped one; a scaler works on the device of its first loss."""
    parameter = torch.nn.Parameter(torch.zeros((), device=target.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter * 1.0).backward()
    scaler.step(optimizer)
    scaler.update()
    case.equal(f"parameter after a step with GradScaler({device!r})", float(parameter), -1.0)
    if scaler.is_enabled():
        parameter.grad = torch.full_like(parameter, math.nan)
        scaler.step(optimizer)
        scaler.update()
        seen = float(parameter), scaler.get_scale()
        case.equal(f"parameter and scale after a skipped step with GradScaler({device!r})", seen, (-1.0, 32768.0))


# Containers


class Losses(NamedTuple):
    """Outputs by name."""

    main: torch.Tensor
    extra: torch.Tensor


@dataclasses.dataclass
class Outputs:
    """Outputs that nothing can walk over."""

    main: torch.Tensor
    extra: torch.Tensor


class OwnList(list):
    """A list."""


class OwnTuple(tuple):
    """A tuple."""


Pair = collections.namedtuple("Pair", ["main", "extra"])
ParameterList = torch.nn.ParameterList

ITERABLES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "list-subclass": lambda a, b: OwnList([a, b]),
    "tuple-subclass": lambda a, b: OwnTuple([a, b]),
    "namedtuple": Pair,
    "NamedTuple": Losses,
    "namedtuple-in-list": lambda a, b: [Pair(a, b)],
    "return-type": lambda a, b: torch.return_types.max((a, b)),
    "deque": lambda a, b: collections.deque([a, b]),
    "set": lambda a, b: {a: None, b: None}.keys(),
    "values": lambda a, b: {"main": a, "extra": b}.values(),
    "generator": lambda a, b: (each for each in (a, b)),
    "zip": lambda a, b: zip((a,), (b,), strict=True),
    "deque-in-list": lambda a, b: [collections.deque([a]), b],
    "list-in-deque": lambda a, b: collections.deque([[a], (b,)]),
    "parameter-list": lambda a, b: ParameterList([torch.nn.Parameter(a), torch.nn.Parameter(b)]),
}


def flat(outputs: Any, deepest: int = 4) -> list[torch.Tensor]:
    """Return the tensors of nested iterables in order; raises TypeError where there is no end to them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if deepest == 0 or not hasattr(outputs, "__iter__"):
        raise TypeError(f"{type(outputs).__name__} without end")
    return [found for each in outputs for found in flat(each, deepest - 1)]


@contract("AMP-SCALE-184")
@pytest.mark.parametrize("name", ITERABLES)
@pytest.mark.parametrize("fresh", [True, False], ids=["first-call", "later-call"])
def test_iterables_of_outputs(case: Case, target: Target, name: str, fresh: bool) -> None:
    a, b = torch.tensor(1.0, device=target.device), torch.tensor([2.0, 3.0], device=target.device)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0) if fresh else started(target, init_scale=4.0)
    outputs = ITERABLES[name](a, b)
    try:
        scaled = scaler.scale(outputs)
        seen = [part.tolist() for part in flat(scaled)]
    except Exception as error:
        case.equal(f"scale() of two outputs in a {name}", repr(error), "two outputs times 4")
        return
    case.equal(f"scale() of two outputs in a {name}", seen, [4.0, [8.0, 12.0]])
    if isinstance(outputs, (list, tuple)):
        case.equal("type of the result", type(scaled).__name__, type(outputs).__name__)


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda a: Outputs(a, a),
    "object": lambda a: object(),
    "module": lambda a: torch.nn.Linear(1, 1),
    "dict": lambda a: {"main": a},
    "ordered-dict": lambda a: collections.OrderedDict(main=a),
    "dict-in-list": lambda a: [a, {"main": a}],
    "text": lambda a: "loss",
    "text-in-list": lambda a: [a, "loss"],
}


@contract("AMP-SCALE-185")
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_iterable_of_outputs(case: Case, target: Target, name: str) -> None:
    loss = torch.tensor(1.0, device=target.device)
    scaler = started(target, init_scale=4.0)
    outputs = OTHERS[name](loss)
    try:
        scaled = scaler.scale(outputs)
    except CLEAR as error:
        case.note(f"scale() of a {name}", repr(error)[:80])
        scaled = None
    if scaled is not None:
        # A mapping that is scaled by its values would be as good.
        values = scaled.values() if isinstance(scaled, Mapping) else scaled
        try:
            seen: Any = {part.item() for part in flat(values)}
        except Exception as error:
            seen = repr(error)
        case.equal(f"scale() of a {name} that was not refused", seen, {4.0})
    case.equal("scale afterwards", scaler.get_scale(), 4.0)
    case.equal("control: scale() of the loss in a list", [part.item() for part in scaler.scale([loss])], [4.0])
