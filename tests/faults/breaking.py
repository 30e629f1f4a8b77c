"""How torch is broken: attributes, dispatcher kernels, and the source text of a function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.self_check.planting import dropped, kernel, replaced

__all__ = [
    "cpu_kernel",
    "decomposed",
    "dropped",
    "edited",
    "exp_in_half",
    "given_the_original",
    "kernel",
    "operator_kernel",
    "replaced",
]


def exp_in_half() -> contextlib.AbstractContextManager[None]:
    """Move the rule of `exp` in CUDA's regions from float32 to float16."""

    def in_half(x: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
            return torch.exp(x.to(torch.float16))

    return kernel("exp", in_half, "AutocastCUDA")


def cpu_kernel(op: str, change: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let the CPU's kernel of an op be one that is given torch's before the arguments."""
    original, keys = torch.library.get_kernel(f"aten::{op}", "CPU"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return kernel(op, functools.partial(change, functools.partial(original.call_boxed, keys)), "CPU")


@contextlib.contextmanager
def operator_kernel(
    operator: Any, key: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let a higher-order operator run what `change` makes of its kernel for a dispatch key."""
    place = getattr(torch._C.DispatchKey, key)
    before = operator.py_kernels[place]
    operator.py_kernels[place] = change(before)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels[place] = before
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def decomposed(op: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let inductor decompose an op by what `change` makes of its decomposition, or of one that leaves it whole."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    before = decompositions.get(op)
    decompositions[op] = change(before or (lambda *given, **named: NotImplemented))
    fast_random_decomps.cache_clear()  # a copy of the table, made by the first graph of a process
    try:
        yield
    finally:
        if before is None:
            del decompositions[op]
        else:
            decompositions[op] = before
        fast_random_decomps.cache_clear()


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


def given_the_original(owner: Any, name: str, change: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Replace a function or method by one that is given the original before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*given: Any, **named: Any) -> Any:
        return change(original, *given, **named)

    return replaced(owner, name, changed)
