"""How a variant stands in torch's place: beside torch's own kernel or function, which it may call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.self_check.planting import kernel, replaced
from tests.variants import Uses

HALF = (torch.bfloat16, torch.float16)
LOW = (torch.float32, *HALF)

Stock = Callable[..., Any]


def has_kernels() -> bool:
    """Whether this torch gives out its kernels (from 2.9 on)."""
    return hasattr(torch.library, "get_kernel")


@contextlib.contextmanager
def around(uses: Uses, op: str, key: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put `function(stock, *args)` in the place of an op's kernel at a dispatch key; `stock` is torch's kernel.

    Not for contracts that compute in several threads: one may wait for a lock of C++ that another holds while its
    kernel waits for the interpreter.
    """
    before = torch.library.get_kernel(f"aten::{op}", key)
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
    stock = functools.partial(before.call_boxed, keys)

    def run(*args: Any, **kwargs: Any) -> Any:
        uses[op] += 1
        with torch._C.DisableTorchFunction():  # modes of the caller see the op, not what it consists of
            return function(stock, *args, **kwargs)

    with kernel(op, run, key):
        yield


@contextlib.contextmanager
def kernels(uses: Uses, key: str, function: Callable[..., Any], *ops: str) -> Iterator[None]:
    """Put the same function around the kernels of several ops."""
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(around(uses, op, key, function))
        yield


@contextlib.contextmanager
def wrapped(uses: Uses, owner: Any, *names: str) -> Iterator[None]:
    """Put wrappers by functools.wraps in the place of functions, as tracing and profiling tools do."""

    def wrapper(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            count(uses, name)
            return function(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(owner, name, wrapper(getattr(owner, name), name)))
        yield


def count(uses: Uses, what: str) -> None:
    """Count a use; not while torch compiles, which would guard on the count and compile again at each call."""
    if not torch.compiler.is_compiling():
        uses[what] += 1


def wide(value: Any) -> Any:
    """Return a tensor of float32 or 16 bits in float64, and anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in LOW else value
