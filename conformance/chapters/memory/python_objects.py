"""Count Python objects: gc-tracked ones, and those reachable from given roots."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable, Iterator

_CLOSED = (types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType)


@contextlib.contextmanager
def collected_apart() -> Iterator[None]:
    """Freeze all existing objects, so that collections inside see only new ones and are fast.

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
    """Return the number of live gc-tracked objects created since `collected_apart()` was entered."""
    gc.collect()
    return len(gc.get_objects())


def reachable(roots: Iterable[object]) -> int:
    """Return the number of objects reachable from `roots`, including numbers and arrays, which are not gc-tracked.

    Objects reachable only through modules, their namespaces or classes that are no roots do not count.
    """
    found = {id(root): root for root in roots}
    new = list(found.values())
    while new:
        new = [item for item in gc.get_referents(*new) if id(item) not in found and not _closed(item)]
        found.update((id(item), item) for item in new)
        new = list({id(item): item for item in new}.values())
    return len(found)


def _closed(item: object) -> bool:
    return isinstance(item, (type, *_CLOSED)) or (isinstance(item, dict) and "__builtins__" in item)
