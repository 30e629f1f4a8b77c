"""The ops that a program gives to the dispatcher in regions, also within other ops, as torch's profiler sees them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch

# How the profiler names arguments that may be tensors that autocast casts, which it does with none of float64.
_ELIGIBLE = frozenset(("float", "c10::Half", "c10::BFloat16", "TensorList"))
_PREFIX = "aten::"
_observing = False


@contextlib.contextmanager
def reached(ops: Collection[str], hiding: Collection[str], device_type: str) -> Iterator[set[str]]:
    """Fill the set with those of the ATen `ops` ("mm") that the block calls in regions, also within other ops.

    Of a region counts what is called while autocast is on for the device type. Left out are calls without a float32 or
    16-bit tensor among their arguments, and those within one of `hiding`. Calls of all threads are seen, where this
    torch can do so (`profile_all_threads`); otherwise those of the thread that opened the region alone. Inside of
    another such block the set stays empty: the profiler has one observer at a time.
    """
    global _observing
    if _observing:
        yield set()
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once: torch 2.13 says on standard error that it starts
    watch = _Watch(device_type, frozenset(_PREFIX + op for op in ops), frozenset(_PREFIX + op for op in hiding))
    _observing = True
    try:
        with mock.patch.object(torch, "set_autocast_enabled", watch.following(torch.set_autocast_enabled)):
            yield watch.found
    finally:
        _observing = False
        watch.stop()


class _Watch:
    """Observes the ops of all threads from where one opens a region until it has left all of its own."""

    def __init__(self, device_type: str, wanted: frozenset[str], hiding: frozenset[str]) -> None:
        self.found: set[str] = set()
        self._device_type = device_type
        self._wanted = wanted
        self._hiding = hiding
        self._lock = threading.Lock()
        self._owner = 0
        self._profile: torch.autograd.profiler.profile | None = None

    def following(self, setter: Callable[..., None]) -> Callable[..., None]:
        """Return a setter, by which regions come and go too, after which the watch looks whether one is open."""

        def set_and_follow(*args: Any) -> None:
            setter(*args)
            if not torch.compiler.is_compiling():  # which the compiler takes for true, so that it sees the setter alone
                self._follow()

        return set_and_follow

    def _follow(self) -> None:
        on, thread = torch.is_autocast_enabled(self._device_type), threading.get_ident()
        with self._lock:
            if on and self._profile is None:
                self._owner = thread
                self._start()
            elif not on and self._profile is not None and self._owner == thread:
                self._stop()

    def _start(self) -> None:
        profile = torch.autograd.profiler.profile(record_shapes=True, experimental_config=_of_all_threads())
        profile._parse_kineto_results = lambda result: []  # a table in Python, which takes most of the time
        profile.__enter__()
        self._profile = profile

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)
            self.found.update(_outside(profile, self._wanted, self._hiding))

    def stop(self) -> None:
        """End the observation, whatever is still open."""
        with self._lock:
            self._stop()


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
