"""How Python objects are counted: those that the garbage collector knows, and those that can be reached from some."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable, Iterator

_CLOSED = (types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType)


@contextlib.contextmanager
def collected_apart() -> Iterator[None]:
    """Leave all objects there are to no collector, so that collections inside see the new ones alone, and are quick.

    Where some were frozen before, all stay so: there is no thawing of a part.
    """
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()


def tracked() -> int:
    """Objects that the collector knows and would not free, made since the outermost `collected_apart`."""
    gc.collect()
    return len(gc.get_objects())


def reachable(roots: Iterable[object]) -> int:
    """How many objects hang on `roots`, numbers and arrays too, which no collector knows.

    What hangs on modules, their namespaces, and classes that are no roots does not count.
    """
    found = {id(root): root for root in roots}
    news = list(found.values())
    while news:
        news = [one for one in gc.get_referents(*news) if id(one) not in found and not _closed(one)]
        found.update((id(one), one) for one in news)
        news = list({id(one): one for one in news}.values())
    return len(found)


def _closed(one: object) -> bool:
    return isinstance(one, (type, *_CLOSED)) or (isinstance(one, dict) and "__builtins__" in one)
