"""From parsed JSON to frozen values, guided by the values' own type hints; unknown keys are refused."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_SHOWN = 60

Decoder = Callable[[Any, str], Any]


class Mismatch(ValueError):
    """A value that its type hint does not allow; `where` is the path to it, such as `cases[3].verdict`."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}" if where else problem)


class UnknownKey(Mismatch):
    """A key that the format does not have: a misspelling, or a claim that no view would show."""


def decode(hint: Any, value: Any, where: str = "") -> Any:
    """Return `value` (of json.loads) as what `hint` says; raises Mismatch or UnknownKey.

    `Any` stands for a scalar or nested lists of scalars; lists become tuples.
    """
    return _decoder(hint)(value, where)


@cache
def _decoder(hint: Any) -> Decoder:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _plain
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice({member.value: member for member in hint})
    if origin is Literal:
        return _choice({choice: choice for choice in arguments})
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _list(arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(*arguments)
    return _scalar(hint)


def _scalar(kind: type) -> Decoder:
    allowed = (int, float) if kind is float else (kind,)

    def scalar(value: Any, where: str) -> Any:
        # bool is an int to Python and not to JSON.
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise Mismatch(where, f"must be {_NAMES[kind]}, not {_show(value)}")
        return value

    return scalar


def _choice(choices: Mapping[Any, Any]) -> Decoder:
    allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)

    def choice(value: Any, where: str) -> Any:
        if (value is not None and not isinstance(value, str)) or value not in choices:
            raise Mismatch(where, f"must be one of {allowed}, not {_show(value)}")
        return choices[value]

    return choice


def _union(hints: tuple[Any, ...]) -> Decoder:
    """`X | None` for any X, or a union of scalars."""
    decoders = [_decoder(hint) for hint in hints if hint is not type(None)]
    nullable = len(decoders) < len(hints)

    def union(value: Any, where: str) -> Any:
        if value is None and nullable:
            return None
        if len(decoders) == 1:
            return decoders[0](value, where)
        if value is None or isinstance(value, (dict, list)):
            raise Mismatch(where, f"must be a text, a number, true or false, not {_show(value)}")
        return value

    return union


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        raise Mismatch(where, "must be a text, a number, true, false, null or a list of these, not an object")
    return tuple(_plain(item, where) for item in value) if isinstance(value, list) else value


def _list(hint: Any) -> Decoder:
    decoder = _decoder(hint)

    def items(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise Mismatch(where, f"must be a list, not {_show(value)}")
        return tuple(decoder(item, f"{where}[{number}]") for number, item in enumerate(value))

    return items


def _mapping(key_hint: Any, value_hint: Any) -> Decoder:
    key_decoder, value_decoder = _decoder(key_hint), _decoder(value_hint)

    def mapping(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(where, f"must be an object, not {_show(value)}")
        return {key_decoder(key, where): value_decoder(item, f"{where}.{key}") for key, item in value.items()}

    return mapping


def _object(cls: Any) -> Decoder:
    decoders = {name: _decoder(hint) for name, hint in get_type_hints(cls).items()}
    needed = [field.name for field in dataclasses.fields(cls) if field.default is field.default_factory]  # both MISSING

    def build(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(where, f"must be an object, not {_show(value)}")
        prefix = f"{where}." if where else ""
        if unknown := sorted(set(value) - set(decoders)):
            raise UnknownKey(where, f"unknown key {unknown[0]!r}; allowed: {', '.join(decoders)}")
        if missing := [name for name in needed if name not in value]:
            raise Mismatch(where, f"the key {missing[0]!r} is missing")
        return cls(**{name: decoders[name](item, f"{prefix}{name}") for name, item in value.items()})

    return build


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
