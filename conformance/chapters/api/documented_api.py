"""Read the documented API of AMP: signatures, deprecated names, and their objects in torch."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ...data import fixture, read_toml

CATEGORIES = {"FutureWarning": FutureWarning, "DeprecationWarning": DeprecationWarning}


@dataclass(frozen=True)
class Signature:
    """The documented parameters of a public name, in order, each as Python writes it."""

    name: str
    parameters: list[str]

    def __str__(self) -> str:
        return self.name.removeprefix("torch.")


@dataclass(frozen=True)
class Deprecated:
    """A deprecated entry point: how it is used, for which device type, how it warns, and what replaces it."""

    name: str
    use: str
    device: str
    category: type[Warning]
    replacement: str
    documented: bool

    @property
    def about(self) -> str:
        """Return the setting that it reads or writes: "dtype" or "enabled"."""
        return self.name.rpartition("_")[2]

    @property
    def function(self) -> str:
        """Return the name of what replaces it, without arguments: no wording of a warning is promised."""
        return self.replacement.partition("(")[0]

    def __str__(self) -> str:
        return self.name.removeprefix("torch.")


def signatures() -> list[Signature]:
    """Return the signatures of fixtures/api.toml."""
    return [Signature(**row) for row in read_toml(fixture("api.toml"))["signature"]]


def deprecated() -> list[Deprecated]:
    """Return the deprecated entry points of fixtures/api.toml."""
    rows = read_toml(fixture("api.toml"))["deprecated"]
    return [Deprecated(**{"documented": False, **row, "category": CATEGORIES[row["category"]]}) for row in rows]


def lookup(name: str) -> Any:
    """Return the object that `name` ("torch.amp.autocast") currently refers to; raises AttributeError."""
    return functools.reduce(getattr, name.split(".")[1:], torch)


def parameters(function: Any) -> list[str]:
    """Return the parameters of `function` as fixtures/api.toml writes them; a method's self is left out."""
    # A deprecated class gets a __new__ of its own from `warnings.deprecated` (Python 3.13), which hides the signature.
    own = inspect.isclass(function) and function.__init__ is not object.__init__
    called = function.__init__ if own else function
    found: list[str] = []
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        found.append(str(parameter.replace(annotation=inspect.Parameter.empty)))
    return found[1:] if found[:1] == ["self"] else found


def is_optional(parameter: str) -> bool:
    """Return whether a call may omit a parameter that `parameters` returned."""
    return "=" in parameter or parameter.startswith("*")
