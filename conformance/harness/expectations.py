"""Expectations: how much faster AMP has to be on a class of devices, who says so, and until when."""

from __future__ import annotations

import datetime
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..data import fixture
from ..report import text
from .tables import Table, rows_of, tables
from .waivers import today as date_of_today

OPERATIONS = ("matmul", "linear", "bmm", "conv-first", "conv-last", "sdpa", "lstm")
STEPS = ("step-mlp", "step-cnn", "step-transformer", "step-lstm")
OPERATION_SIZES = ("launch", "middle", "compute")
STEP_SIZES = ("small", "compute")
BASELINES = ("fp32", "tf32")

_DTYPES = ("fp16", "bf16")
KEYS = tuple(
    "/".join(parts)
    for subjects, sizes in ((OPERATIONS, OPERATION_SIZES), (STEPS, STEP_SIZES))
    for parts in itertools.product(subjects, sizes, _DTYPES, BASELINES)
)
# The largest published ratio of dense 16-bit to fp32 peaks is B200's, 2250 to 75 (fixtures/peaks.toml); storage halves
# beside it at most.
LARGEST_FACTOR = 64.0

_PUBLISHED = {"id", "device_type", "names", "how", "source", "date", "expires", "ratio"}
_CALIBRATED = _PUBLISHED | {"torch", "driver", "reports"}
_OPTIONAL = {"unless", "capability", "reached"}
_RATIO = {"keys", "at_least"}
_RATIO_OPTIONAL = {"source", "seen", "noise", "pairs"}
_TEXTS = {"id", "device_type", "source", "torch", "driver"}
_LISTS = {"names", "unless", "capability", "reports"}
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ExpectationsError(ValueError):
    """An expectations file that cannot be taken at its word; nothing is judged by it."""


@dataclass(frozen=True)
class Expectation:
    """The least speed-up that AMP has to reach in one measurement, and where that number is from."""

    factor: float
    source: str
    date: datetime.date
    how: str  # "published" or "calibrated"
    device_class: str
    expires: datetime.date

    def __str__(self) -> str:
        return f"{self.factor:.4g} times, {self.how} for {self.device_class} on {self.date}: {self.source}"


@dataclass(frozen=True)
class DeviceClass:
    """What devices of one kind are expected to reach: which devices, the provenance, an expectation for each key."""

    id: str
    device_type: str
    names: tuple[str, ...]
    unless: tuple[str, ...]
    capability: tuple[str, ...]
    how: str
    source: str
    date: datetime.date
    expires: datetime.date
    expectations: Mapping[str, Expectation]
    torch: str | None = None
    driver: str | None = None
    reports: tuple[str, ...] = ()
    reached: Mapping[str, float] = field(default_factory=dict)  # TFLOP/s by mode; nothing is judged by it

    def fits(self, device_type: str, name: str, capability: str | None) -> bool:
        """Whether a device is of this class."""
        return (
            device_type == self.device_type
            and any(fnmatchcase(name, pattern) for pattern in self.names)
            and not any(fnmatchcase(name, pattern) for pattern in self.unless)
            and (not self.capability or capability in self.capability)
        )

    def expected(self, key: str) -> Expectation | None:
        """What is expected of the measurement `key`, None where nothing is; raises KeyError for a key there is not."""
        if key not in KEYS:
            raise KeyError(f"{key!r} is no measurement of the speed chapter")
        return self.expectations.get(key)


@dataclass(frozen=True)
class Expectations:
    """The classes of the files that the user named, and those that the suite ships."""

    named: tuple[DeviceClass, ...]
    shipped: tuple[DeviceClass, ...]

    def of(self, device_type: str, name: str, capability: str | None, today: datetime.date) -> DeviceClass | None:
        """The class in force that a device is of, None where there is none.

        Where several fit they are joined: for each key the first that says something of it counts, the user's before
        the suite's. A class is in force on its first and on its last day, too.
        """
        found = [one for one in self._fitting(device_type, name, capability) if one.date <= today <= one.expires]
        if not found:
            return None
        joined = {key: value for one in reversed(found) for key, value in one.expectations.items()}
        return replace(found[0], id=", ".join(one.id for one in found), expectations=joined)

    def why_none(self, device_type: str, name: str, capability: str | None, today: datetime.date) -> str:
        """Why a device is of no class in force, in one line."""
        for one in self._fitting(device_type, name, capability):
            if one.expires < today:
                return f"the expectations of {one.id} ended on {one.expires}"
            if one.date > today:
                return f"the expectations of {one.id} begin on {one.date}; is this machine's clock right?"
        return text.line(f"no expectations are known for {_words(device_type, name, capability)}")

    def mismatch(self, devices: Iterable[tuple[str, str, str | None]]) -> str | None:
        """Why the user's files can judge none of `devices` (type, name, capability), in one line; None where they can.

        A file for another machine must not look like one that this machine was held against.
        """
        devices = list(devices)
        if not self.named or any(one.fits(*device) for one in self.named for device in devices):
            return None
        here = "; ".join(_words(*device) for device in devices) or "no real device"
        patterns = ", ".join(dict.fromkeys(pattern for one in self.named for pattern in one.names))
        return text.line(f"these expectations are for {patterns}, and this run is on {here}")

    def _fitting(self, device_type: str, name: str, capability: str | None) -> list[DeviceClass]:
        return [one for one in (*self.named, *self.shipped) if one.fits(device_type, name, capability)]


def _words(device_type: str, name: str, capability: str | None) -> str:
    return f"{name} ({device_type}{f', {capability}' if capability else ''})"


def load(paths: Iterable[Path] = (), *, today: datetime.date | None = None) -> Expectations:
    """Read the user's files and the suite's own; raises ExpectationsError in one line.

    A user's file that has ended is refused: it was asked for by name, and would judge nothing.
    """
    today = today or date_of_today()
    named = tuple(one for path in paths for one in _in_force(path, read(path), today))
    return Expectations(named, read(fixture("expectations.toml")))


def _in_force(path: Path, classes: tuple[DeviceClass, ...], today: datetime.date) -> tuple[DeviceClass, ...]:
    for one in classes:
        if one.expires < today:
            again = "calibrate again" if one.how == "calibrated" else "look whether its source still stands"
            raise ExpectationsError(f"{path}: the class {one.id!r} ended on {one.expires}: {again}")
        if one.date > today:
            raise ExpectationsError(f"{path}: the class {one.id!r} is dated {one.date}, which is yet to come")
    return classes


def read(path: Path) -> tuple[DeviceClass, ...]:
    """Read the expectations file at `path`; raises ExpectationsError in one line."""
    rows = rows_of(path, "class", "an expectations file", ExpectationsError)
    found = tuple(_device_class(where, row) for where, row in rows)
    ids = [one.id for one in found]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise ExpectationsError(f"{path}: the class {twice!r} is there twice")
    return found


def _device_class(where: str, row: dict[str, Any]) -> DeviceClass:
    how = row.get("how")
    if how not in ("published", "calibrated"):
        raise ExpectationsError(f'{where}: how must be "published" or "calibrated"')
    table = Table(where, row, ExpectationsError)
    table.keys(_PUBLISHED if how == "published" else _CALIBRATED, _OPTIONAL)
    table.texts(*sorted(_TEXTS))
    table.lists(*sorted(_LISTS))
    table.dates("date", "expires")
    if row["expires"] < row["date"]:
        raise ExpectationsError(f"{where}: it ends on {row['expires']}, before it begins on {row['date']}")
    if bad := next((digest for digest in row.get("reports", ()) if not _SHA256.fullmatch(digest)), None):
        raise ExpectationsError(f"{where}: reports: {bad[:70]!r} is no SHA-256 of a report (64 hexadecimal digits)")
    if row["device_type"] == "cuda" and "capability" not in row:
        raise ExpectationsError(f"{where}: the key 'capability' is missing, such as [\"9.0\"]; a name alone misleads")
    _check_reached(where, row.get("reached", {}))
    fields: dict[str, Any] = {key: tuple(row.get(key, ())) for key in _LISTS}
    fields |= {key: value for key, value in row.items() if key not in _LISTS and key != "ratio"}
    return DeviceClass(**fields, expectations=_expectations(where, row))


def _expectations(where: str, device_class: dict[str, Any]) -> dict[str, Expectation]:
    """Spell out the patterns of a class's [[class.ratio]] tables."""
    rows = device_class["ratio"]
    if not rows or not tables(rows):
        raise ExpectationsError(f"{where}: it holds at least one [[class.ratio]] table")
    found: dict[str, Expectation] = {}
    for number, row in enumerate(rows, start=1):
        place = f"{where}, ratio {number}"
        table = Table(place, row, ExpectationsError)
        table.keys(_RATIO, _RATIO_OPTIONAL)
        table.lists("keys")
        table.texts("source")
        source = row.get("source", device_class["source"])
        _check_numbers(place, row)
        expectation = Expectation(
            factor=float(row["at_least"]),
            source=text.line(source),
            date=device_class["date"],
            how=device_class["how"],
            device_class=device_class["id"],
            expires=device_class["expires"],
        )
        for key in dict.fromkeys(key for pattern in row["keys"] for key in _matching(place, pattern)):
            if key in found:
                raise ExpectationsError(f"{place}: {key} has a factor already, {found[key].factor:g}")
            found[key] = expectation
    return found


def _matching(where: str, pattern: str) -> list[str]:
    """The keys that a pattern stands for, part by part: a * does not reach over a slash."""
    parts = pattern.split("/")
    keys = [key for key in KEYS if len(parts) == 4 and all(map(fnmatchcase, key.split("/"), parts))]
    if not keys:
        near = difflib.get_close_matches(pattern, KEYS, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ExpectationsError(f"{where}: {pattern!r} is no <subject>/<size>/<dtype>/<baseline>{hint}")
    return keys


def _check_numbers(where: str, row: dict[str, Any]) -> None:
    if not _number(row["at_least"], 0.0, LARGEST_FACTOR) or row["at_least"] == 0:
        raise ExpectationsError(
            f"{where}: at_least must be a number above 0 and at most {LARGEST_FACTOR:g}, which no device exceeds"
        )
    seen = row.get("seen", [row["at_least"]] * 3)
    if not (isinstance(seen, list) and len(seen) == 3 and all(_number(end, 0.0, 1e6) for end in seen)):
        raise ExpectationsError(f"{where}: seen must be three numbers: low end, median and high end of a ratio")
    if not row["at_least"] <= seen[0] <= seen[1] <= seen[2]:
        raise ExpectationsError(f"{where}: at_least and seen must rise: at_least, low end, median, high end")
    if not _number(row.get("noise", 0.0), 0.0, 10.0):
        raise ExpectationsError(f"{where}: noise must be a number from 0 to 10, the logarithm of a ratio")
    if type(row.get("pairs", 1)) is not int or not 1 <= row.get("pairs", 1) <= 10**9:
        raise ExpectationsError(f"{where}: pairs must be a count")


def _check_reached(where: str, rates: Any) -> None:
    modes = (*_DTYPES, *BASELINES)
    if not isinstance(rates, dict) or not all(mode in modes and _number(rate, 0, 1e9) for mode, rate in rates.items()):
        raise ExpectationsError(f"{where}: reached must be a table of TFLOP/s by mode ({', '.join(modes)})")


def _number(value: Any, low: float, high: float) -> bool:
    """Whether it is a number in bounds; NaN is in none."""
    return type(value) in (int, float) and bool(low <= value <= high)
