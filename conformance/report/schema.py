"""Write the JSON schema of a report from its frozen values: `python -m conformance.report.schema`.

`schema_parts.json` holds what the values do not have: the top level, the folded form of cases, and conditions.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from . import values
from .document import SCHEMA

FILE = Path(__file__).with_name("schema.json")
_PARTS = Path(__file__).with_name("schema_parts.json")
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `report.json`."""
    parts: dict[str, Any] = json.loads(_PARTS.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"Relation": _choice(values.Relation)}
    for root in (values.Header, values.Case, values.Footer):
        _reference(root, found)
    for name, more in parts["$defs"].items():
        found[name] = {**found.get(name, {}), **more}
    parts["properties"] = {"schema": {"const": SCHEMA}, **parts["properties"]}
    return {**parts, "$defs": dict(sorted(found.items()))}


def _schema(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one type hint; the objects that it names are added to `found`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {"$ref": "#/$defs/Measured"}
    if hint == values.Relation:
        return {"$ref": "#/$defs/Relation"}
    if origin is Annotated:
        return {**_schema(arguments[0], found), **dict(arguments[1:])}
    if origin is Literal:
        return _choice(hint)
    if origin in (Union, types.UnionType):
        return _union([_schema(argument, found) for argument in arguments])
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], found)}
    if origin is not None and issubclass(origin, Mapping):
        key, value = (_schema(argument, found) for argument in arguments)
        names = {} if key == {"type": "string"} else {"propertyNames": key}
        return {"type": "object", **names, "additionalProperties": value}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    return _reference(hint, found)


def _reference(cls: Any, found: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in found:
        described = {"description": " ".join(inspect.cleandoc(cls.__doc__).split())}
        if issubclass(cls, Enum):
            found[cls.__name__] = {**described, "enum": [member.value for member in cls]}
        else:
            found[cls.__name__] = described
            found[cls.__name__].update(_object(cls, found))
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _object(cls: Any, found: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {field.name: _schema(hints[field.name], found) for field in dataclasses.fields(cls)},
    }


def _choice(hint: Any) -> dict[str, Any]:
    return {"enum": list(get_args(hint))}


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if all(set(each) == {"type"} for each in schemas):
        return {"type": [each["type"] for each in schemas]}
    return {"anyOf": schemas}


def text() -> str:
    """Return the text of `schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
