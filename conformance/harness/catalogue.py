"""The catalogue: every contract of the suite, read from `chapters/*/contracts.toml` and checked."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ..data import digest_of, in_force, read_toml
from ..report import values
from .tables import Table

FOLDER = Path(__file__).resolve().parent.parent / "chapters"
FILE = "contracts.toml"

# The order in which chapters are run and shown; the two that need an idle machine come last.
CHAPTERS = (
    "cast",
    "region",
    "cache",
    "backward",
    "loss",
    "scale",
    "optimizer",
    "clip",
    "bf16",
    "numerics",
    "parity",
    "recipe",
    "transform",
    "api",
    "compile",
    "distributed",
    "memory",
    "speed",
)
LEVELS = ("must", "should", "info")
AUTHORITIES = ("documented", "registered", "engineering")
NEEDS = ("workload",)

_TITLE_LENGTH = 80
_BANNED_IN_TITLE = re.compile(r"\bshould\b|\btests? that\b|\bwill\b|^(what|where|whether|if)\b", re.IGNORECASE)


class CatalogueError(ValueError):
    """The catalogue breaks its own rules; nothing can be judged against it."""


@dataclass(frozen=True)
class Contract:
    """One testable promise about AMP."""

    id: str
    chapter: str
    title: str
    statement: str
    level: str
    authority: str
    source: str
    failure: str
    next_step: str
    snippet: str
    since: str | None = None
    until: str | None = None
    needs: str | None = None
    """What the user has to hand over for it to be judged: a workload (--workload)."""

    def stated(self) -> values.Contract:
        """Return the promise as a report states it."""
        return values.Contract(**{field.name: getattr(self, field.name) for field in fields(values.Contract)})

    @property
    def judges(self) -> bool:
        """Whether its cases are judged: those of level info record facts about the machine."""
        return self.level != "info"

    @property
    def bounds(self) -> str:
        """The versions of torch that it is about, as a reader sees them; empty where it is about all."""
        words = " ".join(
            f"{word} torch {version}" for word, version in (("from", self.since), ("until", self.until)) if version
        )
        return f"in force {words}" if words else ""

    def holds_for(self, torch_version: str) -> bool:
        """Whether the contract is in force on `torch_version` (`since` inclusive, `until` exclusive)."""
        return in_force(torch_version, self.since, self.until)


@dataclass(frozen=True)
class Chapter:
    """A family of contracts and the test module that checks it."""

    name: str
    title: str
    summary: str
    contracts: tuple[Contract, ...]


@dataclass(frozen=True)
class Catalogue:
    """All chapters in the order in which they run."""

    chapters: tuple[Chapter, ...]

    @functools.cached_property
    def contracts(self) -> dict[str, Contract]:
        """Every contract by its id, in the order of the chapters."""
        return {contract.id: contract for chapter in self.chapters for contract in chapter.contracts}

    def select(self, chapters: Iterable[str], contracts: Iterable[str]) -> dict[str, Contract]:
        """Contracts that match any of the `chapters` and any of the `contracts` patterns (none: all)."""
        chapter_patterns, contract_patterns = tuple(chapters), tuple(contracts)
        return {
            id: contract
            for id, contract in self.contracts.items()
            if matches(contract.chapter, chapter_patterns) and matches(id, contract_patterns)
        }


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether `name` matches any of the wildcard `patterns`, in any case of letters; no pattern matches all."""
    return not patterns or any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


_OPTIONAL = {"since", "until", "needs"}
_REQUIRED = {field.name for field in fields(Contract)} - {"chapter", *_OPTIONAL}


def _contract(chapter: str, row: Mapping[str, Any]) -> Contract:
    name = row.get("id", "a contract without an id")
    table = Table(name, row, CatalogueError)
    table.keys(_REQUIRED, _OPTIONAL)
    table.texts(*row)
    if not re.fullmatch(rf"AMP-{chapter.upper()}-\d{{3}}", row["id"]):
        table.refuse(f"an id of the chapter {chapter} reads AMP-{chapter.upper()}-NNN")
    title = row["title"]
    if len(title) > _TITLE_LENGTH or _BANNED_IN_TITLE.search(title):
        table.refuse(
            f"a title has at most {_TITLE_LENGTH} characters, stands in the present tense, opens with its subject and "
            f"says neither 'should', 'will' nor 'test that': {title!r}"
        )
    table.choice("level", LEVELS)
    table.choice("authority", AUTHORITIES)
    table.choice("needs", NEEDS)
    if row["level"] == "must" and row["authority"] == "engineering":
        table.refuse("a contract on engineering authority may not be a must")
    for key in ("since", "until"):
        try:
            Version(row.get(key, "0"))
        except InvalidVersion:
            table.refuse(f"{key} {row[key]!r} is not a torch version")
    return Contract(chapter=chapter, **{key: value.strip() for key, value in row.items()})


def read_chapter(path: Path) -> Chapter:
    """Read one chapter file; raises CatalogueError with the contract and the rule that it breaks."""
    place = f"{path.parent.name}/{path.name}"
    try:
        table = read_toml(path)
    except ValueError as error:
        raise CatalogueError(f"{place}: not TOML: {error}") from None
    Table(place, table, CatalogueError).keys(("chapter", "title", "summary", "contract"))
    name = table["chapter"]
    if name != path.parent.name or name not in CHAPTERS:
        raise CatalogueError(f"{place}: chapter {name!r} is not the folder's name or not a known chapter")
    contracts = tuple(_contract(name, row) for row in table["contract"])
    return Chapter(name, table["title"].strip(), table["summary"].strip(), contracts)


def load(folder: Path | None = None) -> Catalogue:
    """Read every chapter in `folder` (the suite's own); raises CatalogueError, also for a repeated id or title."""
    folder = FOLDER if folder is None else folder
    chapters = [read_chapter(path) for path in sorted(folder.glob(f"*/{FILE}"))]
    if not chapters:
        raise CatalogueError(f"no chapter in {folder.name}/")
    for key in ("id", "title"):
        seen: set[str] = set()
        for contract in (contract for chapter in chapters for contract in chapter.contracts):
            value = getattr(contract, key)
            if value in seen:
                raise CatalogueError(f"{contract.id}: the {key} {value!r} is used twice")
            seen.add(value)
    return Catalogue(tuple(sorted(chapters, key=lambda chapter: CHAPTERS.index(chapter.name))))


def digest() -> str:
    """Return the SHA-256 of the files of the catalogue, which names its version exactly."""
    return digest_of((f"{path.parent.name}/{path.name}", path) for path in FOLDER.glob(f"*/{FILE}"))
