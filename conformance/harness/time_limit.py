"""The seconds of --time-limit: what the cases of the user's workload may take together, and what they would need."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from .catalogue import Contract
from .endings import Inconclusive, Untestable

LIMITS = {"quick": 120.0, "standard": 600.0, "full": 3000.0}
"""By level: all seeds and steps of a model with a step of 50 ms, in both dtypes; below what ends a case that hangs."""


class TimeLimit:
    """Shares the limit among the cases by the fewest steps that each can do with; what one leaves goes to the others.

    A limit in which the fewest steps of all cases fit is therefore enough for each of them.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.now = now
        self._left = 0
        self._began: float | None = None
        self._spent = 0.0  # when the case that runs now began
        self._share = 1.0  # of the time that was left then

    def plan(self, fewest: Iterable[int]) -> None:
        """Take in the cases, each with the fewest steps that it can do with."""
        self._left = sum(fewest)

    def begin(self, contract: Contract, fewest: int, step_seconds: float) -> float:
        """Return when the next case has to end; `step_seconds` is the longest known time of one step.

        Where no time is left it raises Inconclusive, or, where nothing would be judged, Untestable.
        """
        now = self.now()
        self._began = now if self._began is None else self._began
        self._spent = now - self._began
        self._share = fewest / max(fewest, self._left)
        left, self._left = self._left, max(0, self._left - fewest)
        if self._spent >= self.seconds:
            words = self.words(left * step_seconds, spent_too=True)
            raise (Inconclusive if contract.judges else Untestable)(
                f"the {self.seconds:g} s of --time-limit were spent before; the whole {words}"
            )
        return now + (self.seconds - self._spent) * self._share

    def words(self, seconds: float, *, spent_too: bool = False) -> str:
        """Say that something needs `seconds` and which --time-limit gives as many to the case that runs now."""
        limit = self._spent + (seconds if spent_too else seconds / self._share)
        needed = limit if spent_too else seconds
        # An estimate that was too short is no reason to name a limit that did not suffice.
        return f"needs about {rounded(needed)}; --time-limit {round_up(max(limit, 1.5 * self.seconds))}"


def rounded(seconds: float) -> str:
    """Return a duration as exact as an estimate is: `40 s`, `3 min`."""
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return f"{round(seconds / 60)} min"


def round_up(seconds: float) -> int:
    """Return whole seconds with two digits that count, not below `seconds`."""
    unit = 10 ** max(1, math.floor(math.log10(max(seconds, 1.0))) - 1)
    return math.ceil(seconds / unit) * unit
