"""Enumerated histories of GradScaler calls: every order, every rejected call, every non-finite element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, product
from typing import Any, TypeAlias

import torch

from .capabilities import Call
from .differential import Factory, Mismatch, World, quiet
from .model import NewScale, Output
from .optimizers import FUSED, PLAIN, SGD, SLOTS, Backward
from .state_machine import EXTREMES, INF, NAN, SINGLE, Search, shrunk

History: TypeAlias = tuple[dict[str, Any], tuple[Call, ...]]
"""The settings of a scaler, and the calls that follow."""

SETTINGS = {"init_scale": 48.0, "growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 3, "enabled": True}
LOSS: Call = ("scale", Output(1.0))
UPDATE: Call = ("update",)


def clean(which: int, **also: Any) -> Call:
    """Return a backward call with finite gradients."""
    return ("backward", Backward(which, base=96.0, **also))


def orders(which: Sequence[int], length: int, turns: int) -> Iterator[History]:
    """Yield every order of `length` calls of unscale_, step and update with these optimizers, in one long history.

    In turn, the gradients are finite for all of them, non-finite for one, and for all; each order runs with `turns` of
    these. Before each order the optimizers get their gradients, and after it the iteration ends.
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
        # The next order starts with another pattern even if the number of patterns divides that of orders.
        next(dirt)
    yield {**SETTINGS, "growth_interval": 5}, tuple(calls)


def patterns(length: int) -> Iterator[History]:
    """Yield every pattern of `length` clean and skipped iterations, one history for each interval from 1 to 5.

    The patterns are the subsequences of a de Bruijn sequence, which contains each of them once.
    """
    bits = _de_bruijn(length)
    for interval in range(1, 6):
        calls: list[Call] = [LOSS]
        for number, bit in enumerate([*bits, *bits[: length - 1]]):
            calls += [("backward", Backward(SGD, 96.0, INF if bit else None)), ("step", SGD), UPDATE]
            # Keep the scale in a range in which a wrong factor shows; update(new_scale) does not change the tracker.
            calls += [("update_to", 48.0)] if number % 64 == 63 else []
        yield {**SETTINGS, "growth_interval": interval}, tuple(calls)


def _de_bruijn(length: int) -> list[int]:
    """Return the binary de Bruijn sequence that prefers ones: each bit is one unless that repeats a subsequence."""
    bits, seen = [0] * length, {(0,) * length}
    while True:
        tail = tuple(bits[len(bits) - length + 1 :]) if length > 1 else ()
        following = next((bit for bit in (1, 0) if (*tail, bit) not in seen), None)
        if following is None:
            return bits[: 2**length]
        seen.add((*tail, following))
        bits.append(following)


# The points of an iteration, with the calls that reach them.
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
# Calls that raise at every one of these points, or at some; the model decides.
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
# The rest of the iteration, and a clean one.
REST: tuple[Call, ...] = (("step", PLAIN), UPDATE, LOSS, clean(PLAIN), ("unscale_", PLAIN), ("step", PLAIN), UPDATE)


def refusals(count: int, rest: tuple[Call, ...] = REST) -> Iterator[History]:
    """Yield every `count` attempts in a row at every point of an iteration, with the `rest` after them."""
    for reached in POINTS.values():
        for attempts in product(ATTEMPTS.values(), repeat=count):
            # Pickling is documented between iterations: not after a rejected call, which may or may not have begun one.
            if ("pickle",) in attempts[-1] and (count > 1 or not reached or reached[-1][0] not in ("unscale_", "step")):
                continue
            yield SETTINGS, (*reached, *(call for attempt in attempts for call in attempt), *rest)


def without_scaling() -> Iterator[History]:
    """Yield one history of a disabled scaler: every call that an enabled one rejects, and iterations."""
    calls = [call for attempt in ATTEMPTS.values() for call in (LOSS, clean(PLAIN), *attempt, *REST)]
    yield {**SETTINGS, "enabled": False}, tuple(calls)


def ends(which: int = FUSED) -> Iterator[History]:
    """Yield growth and backoff at both limits of fp32, at zero and at infinity, with different factors.

    The optimizer should be self-scaling: the reciprocals of the smallest scales are infinite.
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
    """Yield every non-finite value at every element of every gradient, and none, by step() alone and after unscale_."""
    calls: list[Call] = [LOSS]
    for which, explicit, layout in product((PLAIN, SGD, FUSED), (False, True), layouts):
        places = sum(slot.size for slot in SLOTS[which] if not slot.optional)
        for place, bad in [(0, None), *product(range(places), (INF, -INF, NAN))]:
            calls.append(("backward", Backward(which, 96.0, bad, place, layout=layout)))
            calls += [("unscale_", which)] if explicit else []
            calls += [("step", which), UPDATE]
        # Keep the scale in range after any number of skips.
        calls.append(("update_to", 3.0))
    yield {**SETTINGS, "growth_factor": 2.0, "backoff_factor": 0.5}, tuple(calls)


def empty_gradients() -> Iterator[History]:
    """Yield iterations with empty gradients, alone and with clean and non-finite ones, up to growth."""
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
    """Yield skipped steps, by step() alone and after unscale_, and the update() after them."""
    calls: list[Call] = [LOSS]
    for which, explicit, bad, layout in product(
        (PLAIN, SGD), (False, True), (INF, -INF, NAN), ("strided", "duplicates")
    ):
        calls.append(("backward", Backward(which, 96.0, bad, 5, layout=layout)))
        calls += [("unscale_", which)] if explicit else []
        calls += [("step", which), UPDATE, ("update_to", 3.0)]
    yield SETTINGS, tuple(calls)


def outputs() -> Iterator[History]:
    """Yield every output alone, in a list, in a tuple and nested, on a new scaler and on one in use."""
    for single in SINGLE:
        containers = (single, [single], (single,), [Output(1.0), (single, [single])])
        for container in containers:
            yield SETTINGS, (("scale", container),)
        yield (
            SETTINGS,
            (
                LOSS,
                *(("scale", container) for container in containers),
                ("update_to", 0.1),
                *(("scale", container) for container in containers),
            ),
        )


def play(
    factory: Factory, device: torch.device, histories: Iterable[History], without: frozenset[str] = frozenset()
) -> Search:
    """Run the histories until the scaler differs from the model, and shrink that one."""
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
                    found = Mismatch(calls[:number], tuple(world.program), tuple(differences))
                    shortest = shrunk(factory, device, settings, found, without)
                    return Search(dict(counted), steps + world.played, count, len(states), shortest)
            steps += world.played
    return Search(dict(counted), steps, count, len(states), None)
