"""The loss scales of a training run as evidence of a report, and what happened to them iteration by iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from .document import WrongTypes
from .values import Case, Evidence, Report

UNIT = "loss scale by iteration"
"""The unit of evidence that is such a history: the scale that a run began with, then that after each iteration."""

_LARGEST = (2 - 2**-23) * 2.0**127

Event = Literal["skipped", "grew", "stayed"]


@dataclass(frozen=True)
class Stretch:
    """Iterations in a row, from `first` to `last` (counted from 1), in which the same happened to the scale.

    `before` and `after` are the scales at its two ends.
    """

    event: Event
    first: int
    last: int
    before: float
    after: float

    @property
    def count(self) -> int:
        """The number of its iterations."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class ScaleHistory:
    """The loss scale of one run: what it began with, and what it was after each iteration."""

    case: Case
    name: str
    scales: tuple[float, ...]

    @property
    def iterations(self) -> int:
        """The number of iterations."""
        return len(self.scales) - 1

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened in each iteration: only a skipped one lowers a scale, and only growth raises it."""
        return tuple(
            "skipped" if after < before else "grew" if after > before else "stayed"
            for before, after in zip(self.scales, self.scales[1:], strict=False)
        )

    def count(self, event: Event) -> int:
        """In how many iterations that happened."""
        return self.events.count(event)

    def stretches(self) -> list[Stretch]:
        """The history in stretches of one kind of event each."""
        found, first = [], 1
        for event, group in groupby(self.events):
            last = first + len(list(group)) - 1
            found.append(Stretch(event, first, last, self.scales[first - 1], self.scales[last]))
            first = last + 1
        return found

    def longest(self, *, without: Event) -> Stretch | None:
        """The longest run of iterations in which that did not happen, the first of several; None without iterations."""
        runs, first = [], 1
        for other, group in groupby(event == without for event in self.events):
            last = first + len(list(group)) - 1
            if not other:
                runs.append(Stretch("stayed", first, last, self.scales[first - 1], self.scales[last]))
            first = last + 1
        return max(runs, key=lambda run: run.count, default=None)


def histories(report: Report) -> Iterator[ScaleHistory]:
    """Yield the histories of a report in its order; raises WrongTypes for one that is none."""
    for case in report.cases:
        for evidence in case.evidence:
            if evidence.unit == UNIT:
                yield ScaleHistory(case, evidence.name, _scales(case, evidence))


def _scales(case: Case, evidence: Evidence) -> tuple[float, ...]:
    where = f"the case {case.id}: {evidence.name!r} is no history of loss scales"
    if not isinstance(evidence.measured, tuple) or not evidence.measured:
        raise WrongTypes(f"{where}: not a list of numbers that begins with the first scale")
    return tuple(_scale(where, value) for value in evidence.measured)


def _scale(where: str, value: object) -> float:
    number = math.inf if value == "inf" else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise WrongTypes(f"{where}: {str(value)[:40]!r} is not a scale")
    if number < 0 or (number > _LARGEST and number != math.inf):
        raise WrongTypes(f"{where}: {str(value)[:40]} is not a scale in fp32")
    return float(number)
