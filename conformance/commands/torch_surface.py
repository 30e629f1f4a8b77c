"""The autocast surface of the torch at hand, read on demand."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from ..harness import requirements
from ..report import surface
from .console import UsageError

_NO_DISPATCHER = (
    "this torch no longer has the private functions of its dispatcher that show which ops autocast ({error}); "
    "update the suite"
)


def read(only: Collection[str] | None = None, *, device: tuple[str, Any] | None = None) -> surface.Surface:
    """Run the overloads of the torch at hand; `device` as in oracles/policy/surface.py."""
    with reader() as asked:
        return surface.parse(asked.read(target_of(), only=only, device=device))


@contextlib.contextmanager
def reader() -> Iterator[ModuleType]:
    """The module that asks torch, imported on demand; raises UsageError where torch is absent or lacks them.

    What torch warns of, deprecated ops mostly, is of no use to who asks in what precision they run.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (problem := requirements.torch_problem()) is not None:
            raise UsageError(problem)
        from ..oracles.policy import surface as asked

        try:
            yield asked
        except AttributeError as error:
            raise UsageError(_NO_DISPATCHER.format(error=error)) from None


def target_of() -> Callable[[str], Any]:
    from ..harness import targets

    return targets.resolve
