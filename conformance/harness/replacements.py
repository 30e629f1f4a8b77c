"""Find functions and classes of torch that another package put its own in place of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

MODULES = (
    "torch.amp",
    "torch.cuda.amp",
    "torch.cpu.amp",
    "torch",
    "torch.autograd",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim",
    "torch.utils.checkpoint",
)
"""Where a user finds what a training step with AMP calls; a name is that of the first one that has it."""
# What torch itself takes from elsewhere and hands on under a name of its own.
_OF_TORCH = {"torch", "torchgen", "functorch", "builtins", "typing_extensions", *sys.stdlib_module_names}


def replaced_functions() -> dict[str, list[str]]:
    """Return the names of torch whose function or class is another package's, by the module that it comes from.

    Methods of torch's classes are looked at too. What is replaced in torch's compiled code does not show here.
    """
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name in MODULES:
        module = sys.modules.get(name) or importlib.import_module(name)
        for spelled, value in _public(module):
            for own, function in ((spelled, value), *_methods(spelled, value)):
                origin = _origin(function)
                if origin is not None and origin.split(".")[0] not in _OF_TORCH and id(function) not in seen:
                    seen.add(id(function))
                    found.setdefault(origin, []).append(own)
    return {origin: sorted(names) for origin, names in sorted(found.items())}


def _origin(function: Any) -> str | None:
    """Return the module that a function was written in; functools.wraps gives it the __module__ of another."""
    scope = getattr(function, "__globals__", None)
    origin = getattr(function, "__module__", None) if scope is None else scope.get("__name__")
    return origin if isinstance(origin, str) else None


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and callable(value) and not isinstance(value, ModuleType):
            yield f"{module.__name__}.{name}", value


def _methods(spelled: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a class of torch has itself."""
    if isinstance(value, type) and value.__module__.split(".")[0] == torch.__name__:
        for name, method in vars(value).items():
            if callable(method) and not isinstance(method, type):
                yield f"{spelled}.{name}", method
