"""The ops that a program gives to the dispatcher, also within other ops, as torch's profiler sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

import torch

# How the profiler names arguments that may be tensors that autocast casts, which it does with none of float64.
_ELIGIBLE = frozenset(("float", "c10::Half", "c10::BFloat16", "TensorList"))
_PREFIX = "aten::"
_observing = False


@contextlib.contextmanager
def reached(ops: Collection[str], hiding: Collection[str]) -> Iterator[set[str]]:
    """Fill the set, when the block ends, with those of the ATen `ops` ("mm") that it calls, also within other ops.

    Left out are calls without a float32 or 16-bit tensor among their arguments, and those within one of `hiding`. Calls
    of all threads are seen, where this torch can do so (`profile_all_threads`); otherwise those of this thread alone.
    Inside of another such block the set stays empty: the profiler has one observer at a time.
    """
    global _observing
    found: set[str] = set()
    if _observing:
        yield found
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once: torch 2.13 says on standard error that it starts
    profile = torch.autograd.profiler.profile(record_shapes=True, experimental_config=_of_all_threads())
    profile._parse_kineto_results = lambda result: []  # a table in Python, which takes most of the time
    _observing = True
    profile.__enter__()
    try:
        yield found
    finally:
        _observing = False
        profile.__exit__(None, None, None)
        wanted = frozenset(_PREFIX + op for op in ops)
        found.update(_outside(profile, wanted, frozenset(_PREFIX + op for op in hiding)))


def _of_all_threads() -> Any:
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _outside(profile: torch.autograd.profiler.profile, wanted: frozenset[str], hiding: frozenset[str]) -> Iterator[str]:
    """Return the names of the wanted ops outside of `hiding`; an op within another of its thread ends before it."""
    events = profile.kineto_results.events()
    named = [(event.name(), event) for event in events]
    if wanted.isdisjoint(name for name, _ in named):
        return
    interesting = wanted | hiding
    kept = [(event.start_ns(), -event.duration_ns(), name, event) for name, event in named if name in interesting]
    hidden_until: dict[int, int] = {}
    for start, negative, name, event in sorted(kept, key=lambda row: row[:2]):
        thread = event.start_thread_id()
        if start < hidden_until.get(thread, 0):
            continue
        if name in hiding:
            hidden_until[thread] = start - negative
        if name in wanted and not _ELIGIBLE.isdisjoint(event.dtypes()):
            yield name.removeprefix(_PREFIX)
