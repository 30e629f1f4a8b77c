"""The page of the op families: where autocast treats ops of one family, or one op on two backends, in different ways.

`python -m tests.generators.families` writes docs/evidence/families.md from fixtures/autocast_overloads.toml, which the
contracts of the chapter cast hold torch to, and from docs/evidence/families.toml: the families, and why each exception
is one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from tabulate import tabulate

from conformance.data import read_toml
from conformance.oracles.policy import overloads
from tests.paths import ROOT

DATA = ROOT / "docs" / "evidence" / "families.toml"
PAGE = ROOT / "docs" / "evidence" / "families.md"
TORCH = "2.15.0"
"""The newest torch whose overloads are known."""
NONE = "-"
_KINDS = {"fp32_set_dtype": "fp32", "fp32_append_dtype": "fp32"}
_PAGE = """# Families of ops

Written by `python -m tests.generators.families` from the autocast overloads of torch {torch}, to which the contracts of
the chapter cast hold each backend, and from [families.toml](families.toml). A family is **alike** where one policy is
that of all its overloads on all backends: {alike} of {families} are. `-` is no policy: the op runs in the types of its
inputs. Of {overloads} overloads {same} have one policy on all backends.

{tables}"""


@dataclass(frozen=True)
class Row:
    """Overloads of a family with the same policies, in the order of overloads.BACKENDS."""

    names: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def alike(self) -> bool:
        return len(set(self.policies)) == 1


def families() -> dict[str, list[Row]]:
    """Return the rows of each family; raises ValueError where an overload is of none or of several."""
    known = {backend: overloads.known(backend, TORCH) for backend in overloads.BACKENDS}
    patterns = {row["name"]: re.compile(row["ops"]) for row in read_toml(DATA)["family"]}
    found: dict[str, dict[tuple[str, ...], list[str]]] = {name: {} for name in patterns}
    for overload in sorted(set().union(*known.values())):
        of = [name for name, pattern in patterns.items() if pattern.fullmatch(overload)]
        if len(of) != 1:
            raise ValueError(f"{overload} is of the families {of}, not of one")
        policies = tuple(_KINDS.get(seen := table.get(overload, NONE), seen) for table in known.values())
        found[of[0]].setdefault(policies, []).append(overload)
    return {name: [Row(tuple(names), key) for key, names in rows.items()] for name, rows in found.items()}


def reasons(row: Row) -> dict[str, None]:
    """Return why the policies of a row are not those of its family on all backends, each with its source."""
    return {
        f"- {exception['why']} ({exception['source']})": None
        for exception in read_toml(DATA)["exception"]
        if any(re.fullmatch(exception["ops"], name) for name in row.names)
    }


def apart(rows: list[Row]) -> list[Row]:
    """Return the rows that are not alike on all backends, or not as most of their family."""
    most = max(rows, key=lambda row: len(row.names))
    return [row for row in rows if row is not most or not row.alike]


def page() -> str:
    """Return the page."""
    found = families()
    tables = []
    for name, rows in found.items():
        grid = [[", ".join(f"`{one}`" for one in row.names), *row.policies] for row in rows]
        tables += [f"## {name.capitalize()}", "", tabulate(grid, ["overloads", *overloads.BACKENDS], tablefmt="github")]
        lines = {line: None for row in apart(rows) for line in reasons(row)}
        tables += ["", *lines, ""] if lines else [""]
    every = [row for rows in found.values() for row in rows]
    return _PAGE.format(
        torch=TORCH,
        alike=sum(len(rows) == 1 and rows[0].alike for rows in found.values()),
        families=len(found),
        overloads=sum(len(row.names) for row in every),
        same=sum(len(row.names) for row in every if row.alike),
        tables="\n".join(tables),
    )


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
