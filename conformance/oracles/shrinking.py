"""The shortest failing history: drawn from a seed, then shrunk step by step within a bounded number of attempts.

For histories that run in tens of microseconds: on its way to the first example hypothesis reads the source of every
module that is loaded, which takes longer than a thousand of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Step = TypeVar("Step")

# Shorter histories that are tried once one fails; the shortest that failed by then is returned.
ATTEMPTS = 400


def shortest(
    draw: Callable[[random.Random], Sequence[Step]],
    fails: Callable[[Sequence[Step]], bool],
    *,
    count: int,
    seed: int,
    simpler: Callable[[Step], Iterable[Step]] = lambda step: (),
) -> tuple[Step, ...] | None:
    """Return the shortest history found that `fails`, of `count` drawn ones and those shrunk from the first; or None.

    `simpler` gives the steps that may stand for a step, simplest first. The same seed draws the same histories.
    """
    generator = random.Random(seed)
    for _ in range(count):
        history = tuple(draw(generator))
        if fails(history):
            return _shrunk(history, fails, simpler)
    return None


def _shrunk(
    history: tuple[Step, ...],
    fails: Callable[[Sequence[Step]], bool],
    simpler: Callable[[Step], Iterable[Step]],
) -> tuple[Step, ...]:
    left = ATTEMPTS
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in _shorter(history, simpler):
            left -= 1
            if left < 0:
                break
            if fails(candidate):
                history, changed = candidate, True
                break
    return history


def _shorter(history: tuple[Step, ...], simpler: Callable[[Step], Iterable[Step]]) -> Iterable[tuple[Step, ...]]:
    """Yield histories that are shorter or simpler: without a half, a quarter..., a step, or with a simpler step."""
    size = len(history)
    chunk = size // 2
    while chunk:
        for start in range(0, size, chunk):
            yield history[:start] + history[start + chunk :]
        chunk //= 2
    for at, step in enumerate(history):
        for other in simpler(step):
            yield (*history[:at], other, *history[at + 1 :])
