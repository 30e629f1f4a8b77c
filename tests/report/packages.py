"""Packages for the tests: of the sample reports, as a run of this suite from a clean checkout would have them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from conformance.report import consistency, document, package
from conformance.report.acceptance import Listed
from conformance.report.values import Suite
from tests import reports

SUITE = Suite("0.1.0", None, None, "d" * 64, "c" * 64)


def sealed(name: str = "conformant", change: Callable[[dict[str, Any]], None] = lambda raw: None) -> bytes:
    """Return the sample `name`, changed, as a run of SUITE writes it."""
    raw = reports.raw(name)
    raw["header"]["suite"].update(digest=SUITE.digest, catalogue=SUITE.catalogue)
    change(raw)
    if raw["footer"] is not None:
        raw["footer"]["digest"] = consistency.digest(raw)
    return json.dumps(raw).encode()


def members(data: bytes) -> dict[str, bytes]:
    """Return the members of the package of the report `data`."""
    return package.members(data, document.parse(document.parsed(data)), SUITE)


def summed(found: dict[str, bytes]) -> dict[str, bytes]:
    """Return the members with sums that are right, as a forger computes them."""
    return {**found, package.SUMS: package.sums(found)}


def catalogue(data: bytes) -> dict[str, Listed]:
    """Return the catalogue that the report `data` was judged by."""
    contracts = document.parse(document.parsed(data)).contracts
    return {id: Listed(dataclasses.replace(one), None, None, None) for id, one in contracts.items()}
