"""Compare any gradient scaler with the model of GradScaler over the histories that check torch's own.

A framework's tests pass a factory of its scaler and get the number of calls that were compared, and the shortest
history, if any, after which the scaler differs from the documentation of torch.amp.GradScaler. See docs/scalers.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from . import enumeration, state_machine
from .capabilities import CAPABILITIES
from .differential import Difference, Factory, Mismatch
from .model import GradScalerModel
from .optimizers import FUSED, PLAIN, SGD

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

__all__ = [
    "CAPABILITIES",
    "Depth",
    "Difference",
    "Driven",
    "Factory",
    "GradScalerModel",
    "Mismatch",
    "drive",
    "machine",
]

Depth: TypeAlias = Literal["short", "long"]
"""The length of the enumerated histories: short ones take about half of the time, and no kind is left out."""


@dataclass(frozen=True)
class Driven:
    """The result of `drive`.

    `rules` holds how often each rule of the state machine ran, `steps` how many calls were compared with the model, in
    `histories` that reached `states` distinct states. `not_driven` are the capabilities that were switched off, with
    their descriptions. `mismatch` is the shortest history found after which the scaler differs from the model, or None.
    """

    rules: tuple[tuple[str, int], ...]
    steps: int
    histories: int
    states: int
    not_driven: tuple[tuple[str, str], ...]
    mismatch: Mismatch | None

    def __str__(self) -> str:
        """Return what was compared, what was not, and the mismatch, as text."""
        played = f"{self.steps} calls of {len(self.rules)} rules in {self.histories} histories, {self.states} states"
        left = [f"not driven: {name}: {what}" for name, what in self.not_driven]
        found = "no mismatch with the model" if self.mismatch is None else f"differs:\n{self.mismatch}"
        return "\n".join((played, *left, found))

    def check(self) -> None:
        """Raise AssertionError with the history as a program if the scaler differs from the model."""
        if self.mismatch is not None:
            raise AssertionError(f"the scaler differs from GradScaler's documentation after\n{self.mismatch}")


def drive(
    factory: Factory,
    *,
    device: str | torch.device = "cpu",
    without: Collection[str] = (),
    histories: int = 100,
    length: int = 20,
    seed: int = 0,
    depth: Depth = "long",
) -> Driven:
    """Run scalers of `factory` and the model through enumerated and random histories; compare them after every call.

    `factory` takes init_scale, growth_factor, backoff_factor, growth_interval and enabled by name and returns a
    scaler for tensors on `device`. `without` names CAPABILITIES that the scaler lacks or implements differently on
    purpose; calls that need them are left out. The enumerated histories are: all patterns of clean and skipped
    iterations, all orders of three calls with two optimizers, an inf or NaN at every element of mixed
    gradients, every rejected call at every point of an iteration, both ends of fp32. `histories` random ones follow, of
    up to `length` rules, the same for the same `seed`, and as many for disabled scalers.

    With the depth "short" the patterns are of three iterations and not of five, the orders of two calls, gradients have
    one layout, and a rejected call is followed by the next step and update and not by an iteration more.

    Raises ValueError for an unknown capability or depth; exceptions of the factory propagate.
    """
    lacking = _checked(without)
    if depth not in ("short", "long"):
        raise ValueError(f"unknown depth {depth!r}; there are 'short' and 'long'")
    place = torch.device(device)
    searches = [enumeration.play(factory, place, _enumerated(lacking, depth), lacking)]
    for enabled in (True, False) if "disabled" not in lacking else (True,):
        if searches[-1].mismatch is None:
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
        mismatch=searches[-1].mismatch,
    )


def machine(
    factory: Factory, *, device: str | torch.device = "cpu", without: Collection[str] = (), enabled: bool = True
) -> type[RuleBasedStateMachine]:
    """Return hypothesis' state machine over scalers of `factory`, for use in a framework's own tests.

    `TestScaler = machine(factory).TestCase` in a test module is enough. The parameters are those of `drive`; a
    mismatch raises an error whose message is the history as a program.
    """
    return state_machine.machine(factory, torch.device(device), without=_checked(without), enabled=enabled)


def _checked(without: Collection[str]) -> frozenset[str]:
    if unknown := sorted(set(without) - set(CAPABILITIES)):
        raise ValueError(f"unknown capability {unknown[0]!r}; there are {', '.join(CAPABILITIES)}")
    return frozenset(without)


def _enumerated(without: frozenset[str], depth: Depth) -> Iterator[enumeration.History]:
    """Yield the enumerated histories; calls that the scaler lacks are skipped when they run."""
    short = depth == "short"
    yield from enumeration.patterns(3 if short else 5)
    other = SGD if "self_scaling" in without else FUSED
    yield from enumeration.orders((PLAIN, other), 2 if short else 3, 1)
    yield from enumeration.bad_numbers(("strided",) if short else ("strided", "duplicates"))
    yield from enumeration.empty_gradients()
    yield from enumeration.skipped_steps()
    yield from enumeration.outputs()
    if "errors" not in without:
        yield from enumeration.refusals(1, enumeration.REST[:2] if short else enumeration.REST)
    yield from enumeration.ends(other) if "extremes" not in without else ()
    yield from enumeration.without_scaling() if "disabled" not in without else ()


def _summed(counts: Iterable[dict[str, int]]) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return tuple(sorted(total.items()))
