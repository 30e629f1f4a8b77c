"""Count the Python lines that a call runs, with sys.settrace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...measure.garbage import uncollected


def lines_of(work: Callable[[], object]) -> int:
    """Calls, lines and returns of Python in this thread during `work`, without what the garbage collector sets off.

    The number is the same for the same way through the same code, however fast the machine.
    """
    seen = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        seen += 1
        return trace

    before = sys.gettrace()
    with uncollected():
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return seen
