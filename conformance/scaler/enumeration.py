"""Histories of GradScaler calls that are enumerated, not drawn: every order, every refused call, every bad number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, product
from typing import Any, TypeAlias

import torch

from .capabilities import Call
from .differential import Departure, Factory, World, quiet
from .model import NewScale, Output
from .optimizers import FUSED, PLAIN, SGD, SLOTS, Backward
from .state_machine import EXTREMES, INF, NAN, SINGLE, Search, shrunk

History: TypeAlias = tuple[dict[str, Any], tuple[Call, ...]]
"""The settings of a scaler, and the calls that follow."""

SETTINGS = {"init_scale": 48.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 3, "enabled": True}
LOSS: Call = ("scale", Output(1.0))
UPDATE: Call = ("update",)


def clean(which: int, **also: Any) -> Call:
    """Gradients without inf or NaN."""
    return ("backward", Backward(which, base=96.0, **also))


def orders(which: Sequence[int], length: int, turns: int) -> Iterator[History]:
    """Every order of `length` calls of unscale_, step and update with these optimizers, in one long history.

    The gradients are, in turn, good for all of them, bad for one, bad for all; each order is played with `turns` of
    these. Before each order the optimizers get their gradients, and an iteration that it leaves open is ended.
    """
    symbols: list[Call] = [*product(("unscale_", "step"), which), UPDATE]
    bad = [(), *((one,) for one in which), tuple(which)]
    dirt = cycle(bad)
    calls: list[Call] = [LOSS]
    for order in product(symbols, repeat=length):
        for _ in range(turns):
            dirty = next(dirt)
            calls += [("backward", Backward(one, 96.0, INF if one in dirty else None)) for one in which]
            calls += order
            calls.append(UPDATE)
        # Another pattern for the next order, whatever the numbers of patterns and of orders are.
        next(dirt)
    yield {**SETTINGS, "growth_interval": 5}, tuple(calls)


def patterns(length: int) -> Iterator[History]:
    """Every pattern of `length` clean and skipped iterations, for every interval from 1 to 5: one history for each.

    The patterns are the stretches of a de Bruijn sequence, which holds each of them once.
    """
    bits = _de_bruijn(length)
    for interval in range(1, 6):
        calls: list[Call] = [LOSS]
        for number, bit in enumerate([*bits, *bits[: length - 1]]):
            calls += [("backward", Backward(SGD, 96.0, INF if bit else None)), ("step", SGD), UPDATE]
            # Kept where a wrong factor is seen; the growth tracker is not touched by it.
            calls += [("update_to", 48.0)] if number % 64 == 63 else []
        yield {**SETTINGS, "growth_interval": interval}, tuple(calls)


def _de_bruijn(length: int) -> list[int]:
    """The binary de Bruijn sequence that prefers ones: each step takes a one unless that repeats a stretch."""
    bits, seen = [0] * length, {(0,) * length}
    while True:
        tail = tuple(bits[len(bits) - length + 1 :]) if length > 1 else ()
        following = next((bit for bit in (1, 0) if (*tail, bit) not in seen), None)
        if following is None:
            return bits[: 2**length]
        seen.add((*tail, following))
        bits.append(following)


# The points of an iteration, and how they are reached.
POINTS: dict[str, tuple[Call, ...]] = {
    "new": (),
    "scaled": (LOSS, clean(PLAIN)),
    "unscaled": (LOSS, clean(PLAIN), ("unscale_", PLAIN)),
    "unscaled, bad": (LOSS, ("backward", Backward(PLAIN, 96.0, NAN, 3)), ("unscale_", PLAIN)),
    "stepped": (LOSS, clean(PLAIN), ("step", PLAIN)),
    "skipped": (LOSS, ("backward", Backward(PLAIN, 96.0, INF, 5)), ("step", PLAIN)),
    "unscaled and stepped": (LOSS, clean(PLAIN), ("unscale_", PLAIN), ("step", PLAIN)),
    "another has stepped": (LOSS, clean(SGD), clean(PLAIN), ("step", SGD)),
    "one of its own has stepped": (LOSS, clean(FUSED), clean(PLAIN), ("step", FUSED)),
    "updated": (LOSS, clean(PLAIN), ("step", PLAIN), UPDATE, clean(PLAIN)),
    "copied": (LOSS, clean(SGD), ("step", SGD), UPDATE, ("deepcopy",)),
    "loaded before use": (("load_state", 6.0, 4, 2),),
}
NO_GRADIENTS: Call = ("backward", Backward(SGD, absent=tuple(range(len(SLOTS[SGD])))))
# Calls that are refused at every one of these points, or at some; the model says where.
ATTEMPTS: dict[str, tuple[Call, ...]] = {
    "unscale_": (("unscale_", PLAIN),),
    "step": (("step", PLAIN),),
    "update": (UPDATE,),
    "update(3.0)": (("update_to", 3.0),),
    "a closure": (("step", PLAIN, (), (("closure", None),)),),
    "no tensor": (("scale", None),),
    "no tensors": (("scale", [7, (None,)]),),
    "two new scales": (("update_to_tensor", NewScale((1.0, 2.0))),),
    "a new scale with a gradient": (("update_to_tensor", NewScale((1.0,), requires_grad=True)),),
    "an empty state": (("load_nothing",),),
    "fp16 gradients": (clean(PLAIN, narrow=True), ("unscale_", PLAIN), ("step", PLAIN), clean(PLAIN)),
    "fp16 gradients of an own one": (clean(FUSED, narrow=True), ("unscale_", FUSED), ("step", FUSED)),
    "no gradients": (NO_GRADIENTS, ("step", SGD)),
    "no gradients, unscaled": (NO_GRADIENTS, ("unscale_", SGD), ("step", SGD), ("unscale_", SGD)),
    "pickle": (("pickle",),),
}
# What follows: the rest of the iteration, and a clean one.
REST: tuple[Call, ...] = (("step", PLAIN), UPDATE, LOSS, clean(PLAIN), ("unscale_", PLAIN), ("step", PLAIN), UPDATE)


def refusals(count: int, rest: tuple[Call, ...] = REST) -> Iterator[History]:
    """Every `count` attempts in a row at every point of an iteration, and the `rest` after them."""
    for reached in POINTS.values():
        for attempts in product(ATTEMPTS.values(), repeat=count):
            # A scaler in use is pickled where documentation says so: not after a call that was refused, which may
            # or may not count as a beginning.
            if ("pickle",) in attempts[-1] and (count > 1 or not reached or reached[-1][0] not in ("unscale_", "step")):
                continue
            yield SETTINGS, (*reached, *(call for attempt in attempts for call in attempt), *rest)


def without_scaling() -> Iterator[History]:
    """Everything that an enabled scaler refuses somewhere, and iterations, on a disabled one, in one history."""
    calls = [call for attempt in ATTEMPTS.values() for call in (LOSS, clean(PLAIN), *attempt, *REST)]
    yield {**SETTINGS, "enabled": False}, tuple(calls)


def ends(which: int = FUSED) -> Iterator[History]:
    """Growth and backoff at both ends of fp32, at zero and at infinity, by one factor and another.

    The optimizer is best one that unscales by itself: the reciprocals of the smallest scales are infinite.
    """
    top = 2.0**127
    scales = (0.0, *EXTREMES, 3 * 2.0**-149, 2.0**126, 1.25 * top, 1.5 * top, INF)
    calls: list[Call] = [LOSS]
    for scale, growth, backoff in product(scales, (2.0, 1.5), (0.5, 0.75)):
        calls += [("update_to", scale), ("set_growth_factor", growth), ("set_backoff_factor", backoff)]
        for bad in (None, None, INF, INF, None):
            calls += [("backward", Backward(which, 96.0, bad)), ("step", which), UPDATE]
    yield {**SETTINGS, "growth_interval": 1}, tuple(calls)


def bad_numbers(layouts: Sequence[str]) -> Iterator[History]:
    """Every bad number at every element of every gradient, and none, by step() alone and after unscale_."""
    calls: list[Call] = [LOSS]
    for which, explicit, layout in product((PLAIN, SGD, FUSED), (False, True), layouts):
        places = sum(slot.size for slot in SLOTS[which] if not slot.optional)
        for place, bad in [(0, None), *product(range(places), (INF, -INF, NAN))]:
            calls.append(("backward", Backward(which, 96.0, bad, place, layout=layout)))
            calls += [("unscale_", which)] if explicit else []
            calls += [("step", which), UPDATE]
        # The scale stays where it is of use, whatever the number of bad ones.
        calls.append(("update_to", 3.0))
    yield {**SETTINGS, "growth_factor": 2.0, "backoff_factor": 0.5}, tuple(calls)


def empty_gradients() -> Iterator[History]:
    """Iterations with gradients without elements, alone and beside clean and bad ones, up to growth."""
    calls: list[Call] = []
    for which, explicit in product((PLAIN, FUSED), (False, True)):
        slots = range(len(SLOTS[which]))
        empty = tuple(number for number in slots if SLOTS[which][number].size != 0)
        for absent, bad in (((), None), (empty, None), (empty, None), (empty, None), ((), INF), (empty, None)):
            calls += [LOSS, ("backward", Backward(which, 96.0, bad, 2, absent))]
            calls += [("unscale_", which)] if explicit else []
            calls += [("step", which), UPDATE]
    yield SETTINGS, tuple(calls)


def skipped_steps() -> Iterator[History]:
    """Steps that are skipped, by step() alone and after unscale_, and the update() after them."""
    calls: list[Call] = [LOSS]
    for which, explicit, bad, layout in product(
        (PLAIN, SGD), (False, True), (INF, -INF, NAN), ("strided", "duplicates")
    ):
        calls.append(("backward", Backward(which, 96.0, bad, 5, layout=layout)))
        calls += [("unscale_", which)] if explicit else []
        calls += [("step", which), UPDATE, ("update_to", 3.0)]
    yield SETTINGS, tuple(calls)


def outputs() -> Iterator[History]:
    """Every kind of output alone, in a list, in a tuple and deeper, on a new scaler and on one in use."""
    for single in SINGLE:
        kinds = (single, [single], (single,), [Output(1.0), (single, [single])])
        for kind in kinds:
            yield SETTINGS, (("scale", kind),)
        yield (
            SETTINGS,
            (LOSS, *(("scale", kind) for kind in kinds), ("update_to", 0.1), *(("scale", kind) for kind in kinds)),
        )


def play(
    factory: Factory, device: torch.device, histories: Iterable[History], without: frozenset[str] = frozenset()
) -> Search:
    """Play the histories until one departs from the model; that one is shrunk."""
    counted: Counter[str] = Counter()
    states: set[tuple[Any, ...]] = set()
    steps = count = 0
    with quiet():
        for count, (settings, calls) in enumerate(histories, 1):
            world = World(factory, device, settings, without)
            for number, call in enumerate(calls, 1):
                counted[call[0]] += 1
                differences = world.play(call)
                states.add(world.abstract())
                if differences:
                    found = Departure(calls[:number], tuple(world.program), tuple(differences))
                    shortest = shrunk(factory, device, settings, found, without)
                    return Search(dict(counted), steps + world.played, count, len(states), shortest)
            steps += world.played
    return Search(dict(counted), steps, count, len(states), None)
