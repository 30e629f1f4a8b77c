"""Files of accepted changes: written excuses for what a newer torch does otherwise than a baseline."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..report.values import AcceptedChange
from ..report.verdicts import Verdict
from .tables import Table, rows_of

GONE = "GONE"
_REQUIRED = {"from", "to", "reason", "owner", "link", "expires"}
_OPTIONAL = {"contract", "op", "cases"}
_VERDICTS = tuple(verdict.value for verdict in Verdict)


class AcceptedError(ValueError):
    """A file of accepted changes that cannot be taken at its word; nothing is compared under it."""


def read(paths: Iterable[Path]) -> tuple[AcceptedChange, ...]:
    """Read the files of accepted changes at `paths`; raises AcceptedError in one line."""
    return tuple(
        _change(where, row)
        for path in paths
        for where, row in rows_of(path, "change", "a file of accepted changes", AcceptedError)
    )


def _change(where: str, row: dict[str, Any]) -> AcceptedChange:
    table = Table(where, row, AcceptedError)
    table.keys(_REQUIRED, _OPTIONAL)
    table.texts("contract", "op", "from", "to", "reason", "owner", "link")
    table.lists("cases", of='patterns over case ids, such as ["*"]')
    table.dates("expires")
    table.choice("from", _VERDICTS)
    table.choice("to", (*_VERDICTS, GONE))
    if row["from"] == row["to"]:
        table.refuse(f"from and to are both {row['from']}: that is no change")
    if "contract" not in row and "op" not in row:
        table.refuse("it names neither a contract nor an op")
    expires: datetime.date = row["expires"]
    return AcceptedChange(
        contract=row.get("contract"),
        op=row.get("op"),
        cases=tuple(row.get("cases", ["*"])),
        before=Verdict(row["from"]),
        after=None if row["to"] == GONE else Verdict(row["to"]),
        reason=row["reason"],
        owner=row["owner"],
        link=row["link"],
        expires=expires.isoformat(),
    )
