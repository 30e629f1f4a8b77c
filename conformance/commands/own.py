"""The suite that is installed here, as packages name it and as `verify` compares with it; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import data
from ..report import acceptance
from ..report.acceptance import Listed
from ..report.values import Suite
from ..version import __version__
from .console import UsageError

_WAIVER = ("contract", "cases", "reason", "owner", "link", "expires")


def own_suite() -> Suite:
    """Return the version and the digests of this suite; without `packaging` that of its catalogue is None."""
    catalogue = _catalogue()
    return Suite(__version__, None, None, data.digest(), catalogue and catalogue.digest())


def own_catalogue() -> Mapping[str, Listed] | None:
    """Return the contracts of this suite, None without `packaging`; raises UsageError for a broken catalogue."""
    if (catalogue := _catalogue()) is None:
        return None
    try:
        contracts = catalogue.load().contracts
    except catalogue.CatalogueError as error:
        raise UsageError(f"the catalogue of this suite cannot be read: {error}") from None
    return {id: Listed(one.stated(), one.since, one.until, one.needs) for id, one in contracts.items()}


def _catalogue() -> Any:
    try:
        from ..harness import catalogue
    except ModuleNotFoundError as missing:
        if missing.name != "packaging":
            raise
        return None
    return catalogue


def accepted_waivers(files: Iterable[Path]) -> Collection[tuple[str, ...]]:
    """Return the keys of the waivers that this suite ships and of those in `files`; raises UsageError."""
    return {key for file in (data.fixture("waivers.toml"), *files) for key in _keys(file)}


def _keys(file: Path) -> Iterable[tuple[str, ...]]:
    rows = data.read_users_toml(file, UsageError).get("waiver", [])
    if not isinstance(rows, list):
        raise UsageError(f"{file}: a waiver file holds [[waiver]] tables")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not set(_WAIVER) <= row.keys() or not isinstance(row["cases"], list):
            raise UsageError(f"{file}, waiver {number}: not a waiver with {', '.join(_WAIVER)}")
        yield acceptance.key(**{name: row[name] for name in _WAIVER})
