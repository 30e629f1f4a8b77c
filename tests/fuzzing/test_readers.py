"""Every reader of a file from outside reads it or refuses it by its own error, whatever the file holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing.readers import READERS, attempt

_BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_HOSTILE = ("<script>alert(1)</script>", "../../etc/passwd", "\x1b[2J", "\u202e", "nan", "", "x" * 5000, "a|b`c`[d](e)")
_JSON = ("report", "surface")
_TOML = ("waivers", "accepted", "expectations")
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(_HOSTILE)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value in parsed JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


def _changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    *parents, last = path
    holder = document
    for key in parents:
        holder = holder[key]
    holder[last] = value
    return document


@pytest.mark.parametrize("name", READERS)
def test_samples_are_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    for sample in READERS[name].samples():
        file.write_bytes(sample)
        assert attempt(READERS[name], file) is None


@pytest.mark.parametrize("name", READERS)
@_BOUNDED
@given(data=st.data())
def test_bytes_of_a_sample_cut_moved_and_replaced(tmp_path: Path, name: str, data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(READERS[name].samples()))
    begin, end = sorted((data.draw(st.integers(0, len(sample))), data.draw(st.integers(0, len(sample)))))
    file = tmp_path / "file"
    file.write_bytes(sample[:begin] + data.draw(st.binary(max_size=20)) + sample[end:])

    attempt(READERS[name], file)


@pytest.mark.parametrize("name", _JSON)
@_BOUNDED
@given(data=st.data())
def test_values_of_a_sample_replaced(tmp_path: Path, name: str, data: st.DataObject) -> None:
    document = json.loads(data.draw(st.sampled_from(READERS[name].samples())))
    places = _places(document)
    for _ in range(data.draw(st.integers(1, 3))):
        place = places[data.draw(st.integers(0, len(places) - 1))]
        try:
            document = _changed(document, place, data.draw(_VALUES))
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # another change took the place away
    file = tmp_path / "file"
    file.write_text(json.dumps(document), encoding="utf-8")

    attempt(READERS[name], file)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "nan" if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


@pytest.mark.parametrize("name", _TOML)
@_BOUNDED
@given(data=st.data())
def test_values_of_a_toml_sample_replaced(tmp_path: Path, name: str, data: st.DataObject) -> None:
    rows = READERS[name].samples()[0].decode().splitlines()
    settable = [number for number, row in enumerate(rows) if " = " in row and not row.startswith((" ", "#"))]
    number = data.draw(st.sampled_from(settable))
    rows[number] = f"{rows[number].split(' = ')[0]} = {_toml(data.draw(_VALUES))}"
    file = tmp_path / "file"
    file.write_text("\n".join(rows), encoding="utf-8", errors="replace")

    attempt(READERS[name], file)


_OF_JSON = {
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "NaN": b'{"schema": NaN}',
    "infinite": b'{"schema": 1e999}',
    "a key twice": b'{"schema": "amp-conformance-report/3", "schema": "x"}',
    "a number of many digits": b'{"schema": ' + b"9" * 10_000 + b"}",
    "a lone surrogate": b'{"schema": "\\ud800"}',
    "not UTF-8": b'{"schema": "\xff"}',
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
}
_OF_TOML = {
    "nested": b"waiver = " + b"[" * 50_000,
    "nested tables": b"[" + b"a." * 50_000 + b"a]",
    "NaN": b"waiver = nan",
    "a key twice": b"waiver = 1\nwaiver = 2",
    "a number of many digits": b"waiver = " + b"9" * 10_000,
    "not UTF-8": b'waiver = "\xff"',
    "a day that is none": b"waiver = 2027-02-31",
    "nothing": b"",
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(pytest.param(name, data, id=f"{name}-{what}") for name in _JSON for what, data in _OF_JSON.items()),
        *(pytest.param(name, data, id=f"{name}-{what}") for name in _TOML for what, data in _OF_TOML.items()),
    ],
)
def test_hostile_file_is_refused_in_one_short_line(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)

    said = attempt(READERS[name], file)

    assert said is not None
    assert len(said) < 1000


@pytest.mark.parametrize("name", READERS)
def test_file_of_a_gibibyte_is_not_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, 2**30)

    said = attempt(READERS[name], file)

    assert said is not None
    assert "bytes" in said
