"""Count Python objects: gc-tracked ones, and those reachable from given roots."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

_ROUNDS, _MORE_ROUNDS = 3, 12
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


def kinds() -> Counter[str]:
    """Return how many of the objects that `tracked` counts are of each type, by name."""
    return Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects())


def rises(use: Callable[[], object], counts: Callable[[], tuple[int, ...]], rounds: int) -> list[list[int]]:
    """Return by how much each of some calls of `use` raises each of the counts."""
    # Of tuples of numbers, which are no objects to the collector.
    seen = [counts()]
    for _ in range(rounds):
        use()
        seen.append(counts())
    return [[now - before for before, now in itertools.pairwise(each)] for each in zip(*seen, strict=True)]


def least_rises(use: Callable[[], object], counts: Callable[[], tuple[int, ...]]) -> list[int]:
    """Return by how much a call of `use` raises each of the counts at least, or 0.

    A leak shows at each call; what comes once may be a cache, what goes is what others leave. Other threads of the
    process leave objects as well, perhaps in a few calls in a row: after such rises more calls tell.
    """
    found = rises(use, counts, _ROUNDS)
    if any(min(each) > 0 for each in found):
        found = [[*few, *more] for few, more in zip(found, rises(use, counts, _MORE_ROUNDS), strict=True)]
    return [max(0, min(each)) for each in found]


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
