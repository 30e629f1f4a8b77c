"""Checks of a table in a TOML file: its keys, and the types of its values."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..data import read_users_toml


@dataclass(frozen=True)
class Table:
    """A table of a file that a user may have written; a check that fails raises `error`, in one line after `where`."""

    where: str
    row: Mapping[str, Any]
    error: type[ValueError]

    def refuse(self, problem: str) -> NoReturn:
        """Raise the error."""
        raise self.error(f"{self.where}: {problem}") from None

    def keys(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Check that all `required` keys are there, and no other but the `optional` ones."""
        allowed = {*required, *optional}
        if unknown := sorted(set(self.row) - allowed):
            self.refuse(f"unknown key {unknown[0]!r}; allowed: {', '.join(sorted(allowed))}")
        if missing := sorted(set(required) - set(self.row)):
            self.refuse(f"the key {missing[0]!r} is missing")

    def texts(self, *keys: str) -> None:
        """Check that those of `keys` that are there hold texts."""
        for key in keys:
            if key in self.row and not _text(self.row[key]):
                self.refuse(f"{key} must be a text that is not empty")

    def lists(self, *keys: str, of: str = "texts that are not empty") -> None:
        """Check that those of `keys` that are there hold lists of texts, which the message calls `of`."""
        for key in keys:
            value = self.row.get(key, ["-"])
            if not isinstance(value, list) or not value or not all(map(_text, value)):
                self.refuse(f"{key} must be a list of {of}")

    def dates(self, *keys: str) -> None:
        """Check that `keys` hold dates, not texts and no times."""
        for key in keys:
            if type(self.row[key]) is not datetime.date:
                self.refuse(f"{key} must be a date without quotes, such as 2027-12-31")

    def choice(self, key: str, choices: Collection[str]) -> None:
        """Check that `key`, if it is there, holds one of `choices`."""
        if key in self.row and self.row[key] not in choices:
            self.refuse(f"{key} {self.row[key]!r} is not one of {', '.join(choices)}")


def rows_of(path: Path, key: str, what: str, error: type[ValueError]) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables `key` of a user's TOML file, each with the words that name its place.

    The file, which messages call `what`, holds at least one and nothing else; raises `error` in one line.
    """
    table = read_users_toml(path, error)
    if unknown := sorted(set(table) - {key}):
        raise error(f"{path}: unknown key {unknown[0]!r}; {what} holds [[{key}]] tables only")
    rows = table.get(key)
    if not rows or not tables(rows):
        raise error(f"{path}: {what} holds at least one [[{key}]] table")
    return [(f"{path}, {key} {number}", row) for number, row in enumerate(rows, start=1)]


def tables(value: Any) -> bool:
    """Whether a value is a list of tables."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
