"""Random histories of GradScaler calls, and a search among them for one that differs from the model.

The search draws by itself: on its way to the first history hypothesis reads the source of every module that is loaded,
which takes longer than a hundred of these. For a framework's own tests there is a state machine of hypothesis as well.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .capabilities import Call
from .differential import Factory, Mismatch, World, mismatch, quiet
from .model import BF16, FP16, FP32, FP64, NewScale, Output, rounded
from .optimizers import FUSED, LAYOUTS, PLAIN, SGD, SLOTS, Backward

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

# Calls that shrinking may run before it reports the shortest history found: a second or two on a CPU.
SHRINK_CALLS = 6000

INF, NAN = float("inf"), float("nan")
TENTH = rounded(0.1, FP32)
# The smallest and the largest scales of fp32, which can decay to zero.
EXTREMES = (2.0**-149, 2.0**-126, 2.0**127, 2.0**128 - 2.0**104)
SCALES = (65536.0, 1.0, 3.0, 0.1, 2.0**-10, 2.0**100, *EXTREMES)
GROWTHS, BACKOFFS = (2.0, 1.5, 10.0, 2.0**64), (0.5, 0.75, 0.1, 2.0**-64)
BASES = (1.0, 0.0, -0.0, 65536.0, -3.0, 0.1, 65504.0, -1e4, 2.0**-24, 2.0**-126, 2.0**-149, 1e30)


class ScalerDiffers(Exception):
    """The real scaler differs from the model; the message is the history as a program."""


@dataclass
class Tally:
    """Statistics of a state machine: rules and calls that ran, distinct states reached, the first mismatch."""

    histories: int = 0
    steps: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    states: set[tuple[Any, ...]] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    first: tuple[dict[str, Any], Mismatch] | None = None

    def record(self, settings: dict[str, Any], mismatch: Mismatch) -> None:
        """Keep the first mismatch, with the settings of its scaler."""
        self.first = self.first or (settings, mismatch)


@dataclass(frozen=True)
class Search:
    """The result of a search: how often each rule ran, and the shortest history that differs from the model, if any."""

    rules: dict[str, int]
    steps: int
    histories: int
    states: int
    mismatch: Mismatch | None


Calls: TypeAlias = tuple[Call, ...]
Draw: TypeAlias = Callable[[random.Random], Calls]


@dataclass(frozen=True)
class Rule:
    """A rule of the state machine: makes the calls, and names the capability that a scaler needs for them."""

    calls: Draw
    needs: str = ""


def call(name: str, *choices: Sequence[Any]) -> Draw:
    """Return a function that makes the call with a random element of each of `choices` as its arguments."""
    return lambda source: ((name, *map(source.choice, choices)),)


def settings_of(enabled: bool, scales: Sequence[float]) -> Callable[[random.Random], dict[str, Any]]:
    """Return a function that makes random settings of a scaler, with intervals from 1 to 5."""
    choices = {
        "init_scale": scales,
        "growth_factor": GROWTHS,
        "backoff_factor": BACKOFFS,
        "growth_interval": range(1, 6),
        "enabled": (enabled,),
    }
    return lambda source: {name: source.choice(values) for name, values in choices.items()}


def gradients(source: random.Random, which: int) -> Backward:
    """Return random gradients for one optimizer: clean, zero, or with an inf or NaN anywhere; some of them absent."""
    slots = tuple(range(len(SLOTS[which])))
    absent = ((), (), slots[:1], slots[-1:], slots[1:], slots[:-1], slots)
    return Backward(
        which,
        base=source.choice(BASES),
        bad=source.choice((None, None, None, None, INF, -INF, NAN)),
        place=source.randrange(17),
        absent=source.choice(absent),
        layout=source.choice(LAYOUTS),
        narrow=source.random() < 0.1,
    )


def iteration(source: random.Random, which: Sequence[int], **fixed: Any) -> Calls:
    """Return the calls of an iteration with some of the optimizers, unscaled before the step or not.

    `fixed` are properties of all its gradients.
    """
    calls: list[Call] = [("scale", source.choice((Output(1.0), Output(TENTH), Output(1.0, FP16))))]
    for optimizer in source.sample(which, source.randint(1, len(which))):
        given = dataclasses.replace(gradients(source, optimizer), **fixed)
        between = source.choice(((), (), ("unscale_",), ("unscale_", "change")))
        arguments: dict[str, Call] = {"unscale_": (optimizer,), "change": (optimizer, 0.25)}
        calls += [("backward", given), *((name, *arguments[name]) for name in between), ("step", optimizer)]
    if source.random() < 0.95:
        calls.append(("update",))
    return tuple(calls)


def iterations(which: Sequence[int], count: int, **fixed: Any) -> Draw:
    """Return a function that makes up to `count` iterations."""
    return lambda source: tuple(
        call for _ in range(source.randint(1, count)) for call in iteration(source, which, **fixed)
    )


SINGLE = (
    Output(1.0), Output(-TENTH), Output(0.0), Output(INF), Output(2.0**-149), Output(3.0, FP32, 1), Output(1.0, FP16),
    Output(1.0, FP16, 1), Output(0.1015625, BF16), Output(1.0, BF16, 2), Output(0.1, FP64), Output(0.1, FP64, 1),
)  # fmt: skip
CONTAINERS: tuple[Any, ...] = (
    [Output(1.0, FP16)], [Output(1.0), Output(-2.0, BF16), Output(1.0, FP16, 1)], [], ((Output(3.0, FP32, 1),),),
    (Output(0.5), [Output(0.1, FP64, 1), (Output(1.0, FP16),)]),
)  # fmt: skip
NO_OUTPUTS = (None, 7, [None], ((7,), 2))
NEW_SCALES = (
    NewScale((2.0,)), NewScale((0.1,)), NewScale((2.0**-149,)), NewScale((INF,)), NewScale((1.0, 2.0)), NewScale(()),
    NewScale((4.0,), requires_grad=True),
)  # fmt: skip


def rules(without: frozenset[str] = frozenset()) -> dict[str, Rule]:
    """Return the rules of the machine for a scaler that lacks the capabilities in `without`."""
    which = (PLAIN, SGD) if "self_scaling" in without else (PLAIN, SGD, FUSED)
    calling = [optimizer for optimizer in which if optimizer != SGD]
    numbers = (65536.0, 1.0, 3.0, 0.1, 0.0, INF, 1e-50, *EXTREMES)

    def used(draw: Draw) -> Draw:
        """Precede the calls, most of the time, by clean iterations that the scaler counts."""
        clean = iterations((SGD,), 2, bad=None, base=1.0)
        return lambda source: (*(clean(source) if source.random() < 0.7 else ()), *draw(source))

    found = {
        "iterations": Rule(iterations(which, 3)),
        "clean_iterations": Rule(iterations(which, 6, bad=None, base=1.0)),
        "skipped_iterations": Rule(iterations(which, 3, bad=INF)),
        "iterations_of_one": Rule(iterations((PLAIN,), 4)),
        "iterations_of_sgd": Rule(iterations((SGD,), 4)),
        "backward": Rule(lambda source: (("backward", gradients(source, source.choice(which))),)),
        "change": Rule(call("change", which, BASES)),
        "zero_grad": Rule(call("zero_grad", (PLAIN, SGD))),
        "scale": Rule(call("scale", SINGLE)),
        "scale_containers": Rule(call("scale", CONTAINERS), "containers"),
        "scale_no_tensors": Rule(call("scale", NO_OUTPUTS), "errors"),
        "unscale_": Rule(call("unscale_", which)),
        "step": Rule(call("step", which)),
        "step_with_arguments": Rule(call("step", calling, ((3,),), ((("tag", "x"),),)), "arguments"),
        "step_with_closure": Rule(call("step", calling, ((),), ((("closure", 0),),)), "closure"),
        "update": Rule(call("update")),
        "update_to": Rule(used(call("update_to", numbers)), "new_scale"),
        "update_to_tensor": Rule(used(call("update_to_tensor", NEW_SCALES)), "new_scale"),
        "set_growth_factor": Rule(used(call("set_growth_factor", GROWTHS)), "setters"),
        "set_backoff_factor": Rule(used(call("set_backoff_factor", BACKOFFS)), "setters"),
        "set_growth_interval": Rule(used(call("set_growth_interval", range(1, 6))), "setters"),
        "save": Rule(used(call("save")), "state"),
        "load": Rule(used(call("load")), "state"),
        "load_state": Rule(used(call("load_state", numbers, range(1, 6), range(5))), "state"),
        "load_nothing": Rule(used(call("load_nothing")), "state"),
        "pickle": Rule(used(call("pickle")), "pickles"),
        "deepcopy": Rule(used(call("deepcopy")), "copies"),
        "switch": Rule(used(call("switch")), "copies"),
    }
    return {name: rule for name, rule in found.items() if rule.needs not in without}


class History:
    """A history that is being built: its settings, the calls so far, and the scaler and the model that run them."""

    def __init__(
        self, factory: Factory, device: torch.device, settings: dict[str, Any], without: frozenset[str], tally: Tally
    ) -> None:
        self._settings, self._tally = settings, tally
        self._calls: list[Call] = []
        self._world = World(factory, device, settings, without)
        self._world.left_out = tally.left_out
        tally.histories += 1
        tally.states.add(self._world.abstract())

    def play(self, name: str, calls: Calls) -> None:
        """Run the calls of a rule; raise ScalerDiffers at the first after which the scaler differs from the model."""
        tally, world = self._tally, self._world
        tally.rules[name] += 1
        for call in calls:
            self._calls.append(call)
            before = world.played
            differences = world.play(call)
            tally.steps += world.played - before
            if differences:
                found = Mismatch(tuple(self._calls), tuple(world.program), tuple(differences))
                tally.record(self._settings, found)
                raise ScalerDiffers(str(found))
            tally.states.add(world.abstract())


def machine(
    factory: Factory,
    device: torch.device,
    *,
    without: frozenset[str] = frozenset(),
    enabled: bool = True,
    scales: Sequence[float] = SCALES,
) -> type[RuleBasedStateMachine]:
    """Return a hypothesis state machine that runs random histories on scalers of `factory`.

    It raises ScalerDiffers at the first call after which the scaler differs from the model.
    """
    from hypothesis import strategies
    from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

    tally = Tally()
    random_settings = settings_of(enabled, scales)
    # One number per rule, the seed of the rule's calls: hypothesis' cost grows with the number of draws.
    numbers = strategies.integers(0, 2**24 - 1)

    def begin(self: Any, number: int) -> None:
        self.history = History(factory, device, random_settings(random.Random(number)), without, tally)

    def rule_of(name: str, calls: Draw) -> Any:
        def play(self: Any, number: int) -> None:
            self.history.play(name, calls(random.Random(number)))

        play.__name__ = play.__qualname__ = name
        return rule(number=numbers)(play)

    members = {name: rule_of(name, made.calls) for name, made in rules(without).items()}
    members["begin"] = initialize(number=numbers)(begin)
    return type("ScalerMachine", (RuleBasedStateMachine,), members)


def search(
    factory: Factory,
    device: torch.device,
    *,
    histories: int,
    length: int = 20,
    seed: int = 0,
    without: frozenset[str] = frozenset(),
    enabled: bool = True,
    scales: Sequence[float] = SCALES,
) -> Search:
    """Run random histories of `length` rules, deterministic by `seed`, until one differs from the model."""
    tally, source = Tally(), random.Random(seed)
    random_settings, table = settings_of(enabled, scales), rules(without)
    with quiet():
        try:
            for _ in range(histories):
                history = History(factory, device, random_settings(source), without, tally)
                # A subset of the rules, so that others do not undo a mismatch before it shows (Groce et al., Swarm
                # testing, ISSTA 2012).
                names = source.sample(list(table), source.randint(len(table) // 4, len(table)))
                for name in source.choices(names, k=length):
                    history.play(name, table[name].calls(source))
        except ScalerDiffers:
            pass
    shortest = None if tally.first is None else shrunk(factory, device, *tally.first, without)
    return Search(dict(tally.rules), tally.steps, tally.histories, len(tally.states), shortest)


def shrunk(
    factory: Factory, device: torch.device, settings: dict[str, Any], found: Mismatch, without: frozenset[str]
) -> Mismatch:
    """Return the shortest history that is found by removing calls of `found` and by simpler arguments and settings.

    The search is deterministic and ends after SHRINK_CALLS calls in all.
    """
    budget = SHRINK_CALLS
    best = found

    def differs(settings: dict[str, Any], calls: Calls) -> bool:
        nonlocal budget, best
        budget -= len(calls)
        shorter = mismatch(factory, device, settings, calls, without) if budget >= 0 else None
        best = shorter or best
        return shorter is not None

    # The first call and the end of a long history are usually enough.
    kept = 4
    while kept < len(found.calls) and not differs(settings, (found.calls[0], *found.calls[-kept:])):
        kept *= 2
    before: Calls = ()
    while best.calls != before:
        before = best.calls
        for size in _halves(len(best.calls)):
            start = 0
            while start < len(best.calls):
                if not differs(settings, best.calls[:start] + best.calls[start + size :]):
                    start += size
        for name, plain in PLAIN_SETTINGS.items():
            if settings[name] != plain and differs({**settings, name: plain}, best.calls):
                settings = {**settings, name: plain}
        for index in range(len(best.calls)):
            for call in _plainer(best.calls[index]) if index < len(best.calls) else ():
                differs(settings, (*best.calls[:index], call, *best.calls[index + 1 :]))
    return best


PLAIN_SETTINGS = {"init_scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}


def _halves(size: int) -> Iterator[int]:
    while size := size // 2:
        yield size


def _plainer(call: Call) -> Iterator[Call]:
    """Yield the call with simpler arguments, one change at a time."""
    name, *arguments = call
    if name == "scale":
        yield ("scale", Output(1.0))
    elif name == "step":
        yield ("step", arguments[0])
    elif name == "backward":
        plain: dict[str, Any] = {"base": 1.0, "bad": None, "place": 0, "absent": (), "layout": "dense", "narrow": False}
        slots = tuple(range(len(SLOTS[arguments[0].which])))
        changes = [*plain.items(), *(("absent", slots[:kept] + slots[kept + 1 :]) for kept in slots)]
        for field_name, value in changes:
            if getattr(arguments[0], field_name) != value:
                yield ("backward", dataclasses.replace(arguments[0], **{field_name: value}))
