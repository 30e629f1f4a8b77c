"""Everything that `torch.backends` has in this torch, with what each entry tells of itself."""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from ..measure.flags import FLAGS

_ROOT = "torch.backends"
# Functions that only tell: is_available, version, get_cpu_capability, flash_sdp_enabled.
_ASKS = re.compile(r"version|(is|get)_\w+|\w+_(enabled|available|allowed)")
_CONSTANT = re.compile(r"[A-Z][A-Z_0-9]*")
_LONGEST = 200
_OF_FLAGS = {flag.name for flag in FLAGS if flag.reported}


def torch_backends() -> dict[str, dict[str, bool | int | float | str | None]]:
    """Return by entry what it tells, such as `is_available`, less what the report has among its flags.

    Nothing is imported: an entry that is not loaded tells nothing. What this torch lacks is left out; a setting that
    raises has its exception as its value.
    """
    names = {found.name for found in pkgutil.iter_modules(torch.backends.__path__)}
    names |= {name for name, value in vars(torch.backends).items() if _is_entry(value)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: dict(_said(name)) for name in sorted(names) if not name.startswith("_")}


def _is_entry(value: Any) -> bool:
    """Whether an attribute of torch.backends is an entry, also a third party's, and no module that its code imports."""
    return isinstance(value, ModuleType) and "." in value.__name__.removeprefix(_ROOT)


def _said(name: str) -> Iterator[tuple[str, Any]]:
    entry = vars(torch.backends).get(name)
    if not isinstance(entry, ModuleType):
        return
    # An entry that checks what is written to it is a class around its module, which both have attributes.
    inner = vars(entry).get("m", entry)
    for attribute in sorted({*dir(entry), *dir(type(entry)), *dir(inner)}):
        if attribute.startswith("_") or _CONSTANT.fullmatch(attribute) or f"{_ROOT}.{name}.{attribute}" in _OF_FLAGS:
            continue
        try:
            value = getattr(entry, attribute)
            if callable(value):
                if not _ASKS.fullmatch(attribute) or _takes_arguments(value):
                    continue
                value = value()
        except AttributeError:
            continue
        except Exception as error:
            value = f"raises {type(error).__name__}"
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        if value is None or isinstance(value, (bool, int, float, str)):
            yield attribute, value[:_LONGEST] if isinstance(value, str) else value


def _takes_arguments(function: Any) -> bool:
    """Whether it cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one of C, which says so when it is called
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is one.empty and one.kind not in free for one in parameters)
