"""Campaigns that judge each fault in a forked child of one process, which imports and collects once for all."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import select
import signal
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable

from tests.faults import Fault

LIMIT = 120
"""Seconds after which a fault is taken to hang what runs under it."""

_STDERR = os.dup(2)


def in_turn(faults: Iterable[Fault]) -> list[Fault]:
    """Order faults so that every chapter has its share of any beginning, in an order that its modules do not make."""
    by_chapter: dict[str, list[Fault]] = {}
    for fault in sorted(faults, key=lambda one: zlib.crc32(one.name.encode())):
        by_chapter.setdefault(fault.chapters[0], []).append(fault)
    ranked = [
        ((place + 0.5) / len(own), chapter, fault)
        for chapter, own in by_chapter.items()
        for place, fault in enumerate(own)
    ]
    return [fault for *_, fault in sorted(ranked, key=lambda one: one[:2])]


def in_child(work: Callable[[], Iterable[str]]) -> tuple[frozenset[str], str]:
    """Do work in a forked child; returns its names and, where it died or hung, a note."""
    source, sink = os.pipe()
    # Its thread is not in the child, which would wait for it at the first exception; the watchdog sets it again.
    faulthandler.cancel_dump_traceback_later()
    child = os.fork()
    if child == 0:
        os.close(source)
        _quiet()
        status = 0
        try:
            answer = json.dumps([sorted(work()), ""])
        except BaseException:
            answer, status = json.dumps([[], traceback.format_exc().strip().splitlines()[-1][:150]]), 1
        with os.fdopen(sink, "w") as stream:
            stream.write(answer)
        os._exit(status)
    os.close(sink)
    with os.fdopen(source) as stream:
        ready, *_ = select.select([stream], [], [], LIMIT)
        if not ready:
            os.kill(child, signal.SIGKILL)
        said = stream.read()
    os.waitpid(child, 0)
    if not said:
        return frozenset(), f"hangs for {LIMIT} s" if not ready else "the process died"
    names, note = json.loads(said)
    return frozenset(names), note


def _quiet() -> None:
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            os.dup2(nothing, stream.fileno())
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def say(words: str) -> None:
    """Write a line of progress."""
    os.write(_STDERR, f"{words}\n".encode())
