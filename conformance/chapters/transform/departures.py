"""Name the ops that some torch is known to change under a transform: each is a case of its own, with a waiver."""

from __future__ import annotations

import functools

from ...data import fixture, read_toml


@functools.cache
def departures(relation: str, backend: str) -> dict[str, frozenset[str]]:
    """Return op -> the ways, "<way>, <kind of the inputs>", in which some torch departs from a relation."""
    found: dict[str, set[str]] = {}
    for row in read_toml(fixture("transform_departures.toml"))["departure"]:
        if row["relation"] == relation and backend in row["backends"]:
            for name in row["names"]:
                found.setdefault(name, set()).update(row["ways"])
    return {name: frozenset(ways) for name, ways in sorted(found.items())}


@functools.cache
def exceptions(relation: str) -> frozenset[str]:
    """Return the ops that a relation does not judge."""
    rows = read_toml(fixture("transform_departures.toml"))["exception"]
    return frozenset(name for row in rows if row["relation"] == relation for name in row["names"])
