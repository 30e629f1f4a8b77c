"""How torch is broken and restored: attributes and dispatcher kernels, each compared with what was there before."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ABSENT = object()
# Where AMP's attributes stand; torch itself replaces others while it is used, such as manual_seed.
_OWNERS = (torch, torch.amp, torch.amp.GradScaler, torch.autocast, torch.nn.functional, torch.nn.utils)
_OF_AMP = ("autocast", "_amp_")


class NotPlanted(Exception):
    """This torch has nothing of the name that a fault replaces."""


class NotRestored(Exception):
    """Something is not as it was before a fault was planted, so nothing in this process can be judged any more."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of an attribute; descriptors are kept as they are, inherited ones stay inherited.

    Raises NotPlanted where there is no such attribute, and NotRestored where it is not as before at the end.
    """
    before = inspect.getattr_static(owner, name, _ABSENT)
    if before is _ABSENT:
        raise NotPlanted(f"{getattr(owner, '__name__', owner)} has no {name}")
    own = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
        if inspect.getattr_static(owner, name, _ABSENT) is not before:
            raise NotRestored(f"{getattr(owner, '__name__', owner)}.{name} is not what it was")


@contextlib.contextmanager
def kernel(op: str, function: Callable[..., Any], key: str) -> Iterator[None]:
    """Put a Python function in the place of the kernel of `op` (`mm`, `sum.dim_IntList`) at a dispatch key.

    Raises NotPlanted where this torch has no such operator or key, and NotRestored where the dispatcher's table of the
    operator is not as before at the end.
    """
    before = torch._C._dispatch_dump(f"aten::{op}")
    library = torch.library.Library("aten", "IMPL")
    try:
        try:
            library.impl(op, function, key)
        except RuntimeError as error:
            raise NotPlanted(str(error).strip().splitlines()[0]) from None
        yield
    finally:
        library._destroy()
        if torch._C._dispatch_dump(f"aten::{op}") != before:
            raise NotRestored(f"the kernels of aten::{op} are not what they were")


@contextlib.contextmanager
def dropped(op: str, key: str) -> Iterator[None]:
    """Take an op's autocast kernel away: the op falls through as if it were on no list."""
    with kernel(op, torch.library.fallthrough_kernel, key):
        yield


def autocast_key(device_type: str) -> str:
    """Return the dispatch key of autocast for a device type."""
    own = device_type == torch._C._get_privateuse1_backend_name()
    return f"Autocast{'PrivateUse1' if own else device_type.upper()}"


@contextlib.contextmanager
def autocast_kernel(op: str, function: Callable[..., Any], device_type: str) -> Iterator[None]:
    """Let `function(dtype of the region, *args)` be what autocast does with the op on a device type."""
    key = autocast_key(device_type)
    try:
        below = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
    except RuntimeError:
        raise NotPlanted(f"there is no dispatch key {key}") from None

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return function(torch.get_autocast_dtype(device_type), *args, **kwargs)

    with kernel(op, run, key):
        yield


@dataclass(frozen=True)
class Whole:
    """What stands, at one moment, in every place that a fault may reach."""

    attributes: Mapping[str, tuple[Any, Any]]
    """By name, each attribute and, of a function, its code."""
    kernels: Mapping[str, str]
    """By operator, the dispatcher's table of its kernels."""

    @classmethod
    def now(cls, device_types: Iterable[str]) -> Whole:
        """Look at torch as it is; of the dispatcher at the operators that autocast has kernels of on these devices."""
        attributes = {
            f"{owner.__name__}.{name}": (value, getattr(value, "__code__", None))
            for owner in _OWNERS
            for name, value in list(vars(owner).items())
            if owner is not torch or any(part in name for part in _OF_AMP)
        }
        ops = {op for device_type in device_types for op in _registered(autocast_key(device_type))}
        return cls(attributes, {op: torch._C._dispatch_dump(op) for op in ops if op.startswith("aten::")})

    def changed_since(self, before: Whole) -> list[str]:
        """Return the names of what is not what it was; what was imported meanwhile is no change."""
        gone = (None, None)
        found = [
            name
            for name, was in before.attributes.items()
            if any(one is not other for one, other in zip(self.attributes.get(name, gone), was, strict=True))
        ]
        return found + [op for op, was in before.kernels.items() if self.kernels.get(op) != was]


def _registered(key: str) -> list[str]:
    """Return the operators that have a kernel at a dispatch key; none where torch does not know the key."""
    try:
        found: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    except RuntimeError:
        return []
    return found
