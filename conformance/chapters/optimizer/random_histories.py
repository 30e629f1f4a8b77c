"""Random histories of clean and non-finite training iterations, and their shrinking."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

BAD = (math.inf, -math.inf, math.nan)
PARAMETERS = 4  # of the linear loss that get gradients, at most


@dataclass(frozen=True)
class Iteration:
    """One iteration of training.

    `seed` is that of the gradients; `bad` holds (parameter, element, value), the indices modulo their sizes; `without`
    is a parameter that the loss does not use. `explicit`: unscale_() is called before step(). `zeros`: gradients are
    set to zero, not to None. `before` runs first: nothing, "halve lr", "reload" (both state dicts, as in a resumed run)
    or "move scale" (update(new_scale) with half the scale).
    """

    seed: int
    bad: tuple[tuple[int, int, float], ...] = ()
    without: int | None = None
    explicit: bool = False
    zeros: bool = False
    before: str = ""

    @property
    def clean(self) -> bool:
        return not self.bad

    def __str__(self) -> str:
        parts = ["clean" if self.clean else " and ".join(f"{value} at {place}" for *place, value in self.bad)]
        parts += [f"without parameter {self.without}"] if self.without is not None else []
        parts += ["unscale_()"] * self.explicit + ["zero_grad(set_to_none=False)"] * self.zeros
        parts += [f"first {self.before}"] * bool(self.before)
        return f"{', '.join(parts)} (slopes {self.seed})"


def histories(
    draw: random.Random, *, longest: int = 8, sparse: bool = False, clean_first: bool = False
) -> list[Iteration]:
    """Return a random history in which about half of the iterations are non-finite, the first as likely as others.

    `sparse` gradients are set to None, never to zero, and every parameter is used.
    `clean_first` begins with one clean iteration.
    """
    history = [_iteration(draw, sparse) for _ in range(draw.randint(3, longest))]
    return [Iteration(draw.randrange(10**6)), *history] if clean_first else history


def simpler(iteration: Iteration) -> Iterator[Iteration]:
    """Yield iterations that are simpler in one property, for shrinking."""
    if iteration.before:
        yield replace(iteration, before="")
    if iteration.without is not None:
        yield replace(iteration, without=None)
    if iteration.explicit:
        yield replace(iteration, explicit=False)
    if iteration.zeros:
        yield replace(iteration, zeros=False)
    if len(iteration.bad) > 1:
        yield from (replace(iteration, bad=(one,)) for one in iteration.bad)
    if iteration.bad and iteration.bad[0] != (0, 0, math.inf):
        yield replace(iteration, bad=((0, 0, math.inf),))


def _iteration(draw: random.Random, sparse: bool) -> Iteration:
    bad = tuple(
        (draw.randrange(PARAMETERS), draw.randrange(100), draw.choice(BAD)) for _ in range(draw.choice((0, 0, 1, 2)))
    )
    return Iteration(
        seed=draw.randrange(10**6),
        bad=bad,
        without=None if sparse else draw.choice((None, None, *range(PARAMETERS))),
        explicit=draw.random() < 0.5,
        zeros=not sparse and draw.random() < 0.3,
        before=draw.choice(("", "", "", "", "halve lr", "reload", "move scale")),
    )
