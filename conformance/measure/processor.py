"""The processor's own account of this process: time spent computing, which other processes do not lengthen."""

from __future__ import annotations

import time
from collections.abc import Callable

from conformance.measure.clocks import Work


class ProcessorClock:
    """Time that all threads of this process computed: what the work took, however busy the machine is.

    Waiting is not in it (`voluntary_waits` counts how often this thread did).
    """

    name = "processor time of this process"

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self._now = now

    def seconds(self, work: Work) -> float:
        start = self._now()
        work()
        return self._now() - start


def voluntary_waits(work: Work) -> int | None:
    """How often this thread gave the processor up of itself during `work`, by sleeping or waiting; None if not told.

    The kernel's ru_nvcsw of the thread; being interrupted for another process counts as ru_nivcsw, and not here.
    """
    try:
        import resource

        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw  # Linux alone tells it by thread
    except (ImportError, AttributeError):
        return None
    work()
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
