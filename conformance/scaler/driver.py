"""The independent model of GradScaler, and a way to drive any scaler through the histories that torch's is driven by.

A framework's tests hand over what makes its scaler and get back what was played, and the shortest history, if there
is any, after which the scaler is not what the documentation of torch.amp.GradScaler says. See docs/scalers.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import enumeration, state_machine
from .capabilities import CAPABILITIES
from .differential import Departure, Difference, Factory
from .model import GradScalerModel
from .optimizers import FUSED, PLAIN, SGD

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

__all__ = ["CAPABILITIES", "Departure", "Difference", "Driven", "Factory", "GradScalerModel", "drive", "machine"]


@dataclass(frozen=True)
class Driven:
    """What came of driving a scaler.

    `rules` says how often each rule of the state machine was played, `steps` how many calls were compared with the
    model, in `histories` that reached `states` distinct states. `not_driven` are the capabilities that were switched
    off, with what was not looked at because of it. `departure` is the shortest history found after which the scaler
    is not what the model says, or None.
    """

    rules: tuple[tuple[str, int], ...]
    steps: int
    histories: int
    states: int
    not_driven: tuple[tuple[str, str], ...]
    departure: Departure | None

    def __str__(self) -> str:
        """What was driven, what was not, and the departure, for a person to read."""
        played = f"{self.steps} calls of {len(self.rules)} rules in {self.histories} histories, {self.states} states"
        left = [f"not driven: {name}: {what}" for name, what in self.not_driven]
        found = "no departure from the model" if self.departure is None else f"departs:\n{self.departure}"
        return "\n".join((played, *left, found))

    def check(self) -> None:
        """Raise AssertionError with the history as a program where the scaler departed from the model."""
        if self.departure is not None:
            raise AssertionError(f"the scaler is not what GradScaler's documentation says after\n{self.departure}")


def drive(
    factory: Factory,
    *,
    device: str | torch.device = "cpu",
    without: Collection[str] = (),
    histories: int = 100,
    length: int = 20,
    seed: int = 0,
) -> Driven:
    """Drive scalers of `factory` through enumerated and random histories beside the model, and compare all that shows.

    `factory` takes init_scale, growth_factor, backoff_factor, growth_interval and enabled by name and returns a
    scaler for tensors on `device`. `without` names what the scaler does not have or does on purpose differently, out
    of CAPABILITIES; calls that need it are left out. First come the enumerated histories: all patterns of clean
    and skipped iterations, all orders of three calls with two optimizers, an inf or NaN at every element of mixed
    gradients, every refused call at every point of an iteration, both ends of fp32. Then `histories` random ones of
    up to `length` rules, the same for the same `seed`, and as many for disabled scalers.

    Raises ValueError for an unknown capability. What the factory raises is not caught.
    """
    lacking = _checked(without)
    place = torch.device(device)
    searches = [enumeration.play(factory, place, _enumerated(lacking), lacking)]
    for enabled in (True, False) if "disabled" not in lacking else (True,):
        if searches[-1].departure is None:
            found = state_machine.search(
                factory, place, histories=histories, length=length, seed=seed, without=lacking, enabled=enabled
            )
            searches.append(found)
    return Driven(
        rules=_summed(search.rules for search in searches[1:]),
        steps=sum(search.steps for search in searches),
        histories=sum(search.histories for search in searches),
        states=sum(search.states for search in searches),
        not_driven=tuple((name, CAPABILITIES[name]) for name in CAPABILITIES if name in lacking),
        departure=searches[-1].departure,
    )


def machine(
    factory: Factory, *, device: str | torch.device = "cpu", without: Collection[str] = (), enabled: bool = True
) -> type[RuleBasedStateMachine]:
    """Return hypothesis' state machine over scalers of `factory`, for a framework that wants to run it by itself.

    `TestScaler = machine(factory).TestCase` in a test module is enough. The parameters are those of `drive`; a
    departure raises an error whose message is the history as a program.
    """
    return state_machine.machine(factory, torch.device(device), without=_checked(without), enabled=enabled)


def _checked(without: Collection[str]) -> frozenset[str]:
    if unknown := sorted(set(without) - set(CAPABILITIES)):
        raise ValueError(f"unknown capability {unknown[0]!r}; there are {', '.join(CAPABILITIES)}")
    return frozenset(without)


def _enumerated(without: frozenset[str]) -> Iterator[enumeration.History]:
    """The histories that are not drawn; calls that need what the scaler lacks are left out when they are played."""
    yield from enumeration.patterns(5)
    other = SGD if "self_scaling" in without else FUSED
    yield from enumeration.orders((PLAIN, other), 3, 1)
    yield from enumeration.bad_numbers(("strided", "duplicates"))
    yield from enumeration.empty_gradients()
    yield from enumeration.skipped_steps()
    yield from enumeration.outputs()
    yield from enumeration.refusals(1) if "errors" not in without else ()
    yield from enumeration.ends(other) if "extremes" not in without else ()
    yield from enumeration.without_scaling() if "disabled" not in without else ()


def _summed(counts: Iterable[dict[str, int]]) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return tuple(sorted(total.items()))
