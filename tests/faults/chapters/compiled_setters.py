"""Faults of setters in compiled functions: what they set is undone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import given_the_original


def _calling(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let what torch.compile returns be `call` of the compiled function and the arguments."""

    def wrong(right: Any, program: Any, *args: Any, **kw: Any) -> Any:
        return functools.partial(call, right(program, *args, **kw))

    return given_the_original(torch, "compile", wrong)


@fault("AMP-COMPILE-081", level="standard")
def compiled_functions_restore_the_default_dtype() -> Iterator[None]:
    """A compiled function that sets the default dtype puts the old one back when it ends."""

    def call(compiled: Any, *given: Any) -> Any:
        before = torch.get_default_dtype()
        out = compiled(*given)
        torch.set_default_dtype(before)
        return out

    with _calling(call):
        yield


@fault("AMP-COMPILE-081", level="standard")
def compiled_functions_leave_autocast_disabled() -> Iterator[None]:
    """A compiled function that is called in a region leaves autocast disabled."""

    def call(compiled: Any, *given: Any) -> Any:
        out = compiled(*given)
        torch.set_autocast_enabled("cpu", False)
        return out

    with _calling(call):
        yield
