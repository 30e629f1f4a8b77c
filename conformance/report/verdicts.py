"""Verdicts: what a case or a contract comes to, and what a whole run comes to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Verdict(str, Enum):
    """What a case or a contract comes to; members stand in order of severity, the mildest first."""

    PASS = "PASS"
    UNSUPPORTED = "UNSUPPORTED"
    UNTESTABLE = "UNTESTABLE"
    WAIVED = "WAIVED"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Return the most severe of `verdicts`; raises ValueError where there is none."""
        return max(verdicts, key=list(cls).index)


# Verdicts of cases whose check ran to an end; a run with none of them has shown nothing.
EXECUTED = frozenset({Verdict.PASS, Verdict.FAIL, Verdict.WAIVED, Verdict.INCONCLUSIVE, Verdict.ERROR})


class Overall(str, Enum):
    """What a whole run comes to."""

    CONFORMANT = "CONFORMANT"
    NOT_CONFORMANT = "NOT CONFORMANT"
    INCONCLUSIVE = "INCONCLUSIVE"
    PARTIAL = "PARTIAL"
    INCOMPLETE = "INCOMPLETE"
    NOTHING_RAN = "NOTHING RAN"
