"""From parsed JSON to frozen values, guided by the values' own type hints; unknown keys are refused."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_SHOWN = 60

Decoder = Callable[[Any], Any]


class Mismatch(ValueError):
    """A value that its type hint does not allow; `where` is the path to it, such as `cases[3].verdict`."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = ""

    def inside(self, place: str | int) -> Mismatch:
        """Return the same, said of what holds the value at the key or the number `place`."""
        here = f"[{place}]" if isinstance(place, int) else place
        self.where = f"{here}{'.' * (self.where[:1] not in ('', '['))}{self.where}"
        return self

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" if self.where else self.problem


class UnknownKey(Mismatch):
    """A key that the format does not have: a misspelling, or a claim that no view would show."""


def decode(hint: Any, value: Any) -> Any:
    """Return `value` (of json.loads) as what `hint` says; raises Mismatch or UnknownKey.

    `Any` stands for a scalar or nested lists of scalars, `object` for what is not looked at; lists become tuples. An
    instance of a dataclass stays itself.
    """
    return _decoder(hint)(value)


def each(decoder: Decoder, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what `decoder` makes of each of `values`; a Mismatch that it raises names the one."""
    found: list[Any] = []
    try:
        found.extend(map(decoder, values))
    except Mismatch as mismatch:
        raise mismatch.inside(len(found)) from None
    return tuple(found)


@cache
def _decoder(hint: Any) -> Decoder:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _plain
    if hint is object:
        return lambda value: value
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

    def scalar(value: Any) -> Any:
        # bool is an int to Python and not to JSON.
        if type(value) is not kind and (not isinstance(value, allowed) or isinstance(value, bool)):
            raise Mismatch(f"must be {_NAMES[kind]}, not {_show(value)}")
        return value

    return scalar


def _choice(choices: Mapping[Any, Any]) -> Decoder:
    allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)

    def choice(value: Any) -> Any:
        if (value is not None and not isinstance(value, str)) or value not in choices:
            raise Mismatch(f"must be one of {allowed}, not {_show(value)}")
        return choices[value]

    return choice


def _union(hints: tuple[Any, ...]) -> Decoder:
    """`X | None` for any X, or a union of scalars."""
    decoders = [_decoder(hint) for hint in hints if hint is not type(None)]
    nullable = len(decoders) < len(hints)

    def union(value: Any) -> Any:
        if value is None and nullable:
            return None
        if len(decoders) == 1:
            return decoders[0](value)
        if value is None or isinstance(value, (dict, list)):
            raise Mismatch(f"must be a text, a number, true or false, not {_show(value)}")
        return value

    return union


def _plain(value: Any) -> Any:
    if type(value) in _NAMES:
        return value
    if isinstance(value, dict):
        raise Mismatch("must be a text, a number, true, false, null or a list of these, not an object")
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _list(hint: Any) -> Decoder:
    decoder = _decoder(hint)

    def items(value: Any) -> Any:
        if not isinstance(value, list):
            raise Mismatch(f"must be a list, not {_show(value)}")
        return each(decoder, value)

    return items


def _mapping(key_hint: Any, value_hint: Any) -> Decoder:
    key_decoder, value_decoder = _decoder(key_hint), _decoder(value_hint)

    def mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(f"must be an object, not {_show(value)}")
        found = {}
        for key, item in value.items():
            name = key_decoder(key)
            try:
                found[name] = value_decoder(item)
            except Mismatch as mismatch:
                raise mismatch.inside(key) from None
        return found

    return mapping


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return what stands for an absent key, or MISSING where it has to be there."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _object(cls: Any) -> Decoder:
    hints = get_type_hints(cls)
    fields = {field.name: (_decoder(hints[field.name]), _default(field)) for field in dataclasses.fields(cls)}
    places = [(name, *field) for name, field in fields.items()]

    def build(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise Mismatch(f"must be an object, not {_show(value)}")
        if value.keys() != fields.keys():
            if unknown := sorted(value.keys() - fields.keys()):
                raise UnknownKey(f"unknown key {unknown[0]!r}; allowed: {', '.join(fields)}")
            for name, (_, default) in fields.items():
                if name not in value and default is dataclasses.MISSING:
                    raise Mismatch(f"the key {name!r} is missing")
        found, at = [], ""
        try:
            for at, decoder, default in places:
                found.append(decoder(value[at]) if at in value else default)
        except Mismatch as mismatch:
            raise mismatch.inside(at) from None
        return cls(*found)

    return build


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
