"""The ops that a program gives to the dispatcher, also within other ops, as torch's profiler sees them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

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
    Where something is observed already the set stays empty: the profiler has one observer at a time.
    """
    watch = _Watch(ops, hiding)
    watch.start()
    try:
        yield watch.found
    finally:
        watch.stop()


@contextlib.contextmanager
def reached_in_regions(ops: Collection[str], hiding: Collection[str], device_type: str) -> Iterator[set[str]]:
    """Fill the set as `reached` does with what is called while autocast is on for the device type.

    Where two threads have regions, what is called counts from where the first one opens its own until it closes it.
    """
    watch, lock, owners = _Watch(ops, hiding), threading.Lock(), list[int]()
    setter = torch.set_autocast_enabled  # which regions call too

    def set_and_follow(*args: Any) -> None:
        setter(*args)
        if torch.compiler.is_compiling():  # the compiler takes it for true, and so sees the setter alone
            return
        on, thread = torch.is_autocast_enabled(device_type), threading.get_ident()
        with lock:
            if on and not owners:
                owners.append(thread)
                watch.start()
            elif not on and owners == [thread]:
                owners.clear()
                watch.stop()

    try:
        with mock.patch.object(torch, "set_autocast_enabled", set_and_follow):
            yield watch.found
    finally:
        watch.stop()


class _Watch:
    """An observer of the ops of all threads, which can be started and stopped several times."""

    def __init__(self, ops: Collection[str], hiding: Collection[str]) -> None:
        self.found: set[str] = set()
        self._wanted = frozenset(_PREFIX + op for op in ops)
        self._hiding = frozenset(_PREFIX + op for op in hiding)
        self._profile: torch.autograd.profiler.profile | None = None

    def start(self) -> None:
        """Observe from here on, unless another watch does."""
        global _observing
        if _observing:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once: torch 2.13 says on standard error that it starts
        profile = torch.autograd.profiler.profile(record_shapes=True, experimental_config=_of_all_threads())
        profile._parse_kineto_results = lambda result: []  # a table in Python, which takes most of the time
        profile.__enter__()
        self._profile, _observing = profile, True

    def stop(self) -> None:
        """Take note of what was called since the start."""
        global _observing
        profile, self._profile = self._profile, None
        if profile is not None:
            _observing = False
            profile.__exit__(None, None, None)
            self.found.update(_outside(profile, self._wanted, self._hiding))


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
