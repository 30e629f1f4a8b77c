"""How torch is broken: attributes, dispatcher kernels, and the source text of a function."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of an attribute, keeping descriptors as they are."""
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def kernel(op: str, function: Callable[..., Any], key: str) -> Iterator[None]:
    """Put a Python function in the place of the kernel of `op` (`mm`, `sum.dim_IntList`) at a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(op, function, key)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def dropped(op: str, key: str) -> Iterator[None]:
    """Take an op's autocast kernel away: the op falls through as if it were on no list."""
    with kernel(op, torch.library.fallthrough_kernel, key):
        yield


@contextlib.contextmanager
def edited(function: Any, old: str, new: str) -> Iterator[None]:
    """Change the source text of a Python function: `old` must be there once, and `new` takes its place."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{function.__qualname__} holds {old!r} {source.count(old)} times, not once")
    # Decorators have done their work already; only the body is changed.
    body = source[source.index("def ") :].replace(old, new)
    if source.lstrip().startswith("async"):
        raise ValueError("coroutines are not edited")
    names: dict[str, Any] = {}
    exec(compile(body, f"<edited {function.__qualname__}>", "exec"), function.__globals__, names)
    changed = names[function.__name__]
    before = function.__code__
    function.__code__ = changed.__code__
    try:
        yield
    finally:
        function.__code__ = before
