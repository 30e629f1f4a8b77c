"""Baselines: reports reduced to their verdicts, small enough to keep, and those of stock PyTorch by their names."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import fixture_folder
from . import document, layout
from .comparison import release
from .document import SCHEMA, ReportError, WrongKind, load
from .values import Case, Contract, Report

KIND = "amp-conformance-baseline/1"
STOCK = "stock"
"""The name of the baseline of stock PyTorch in the release of the newer torch."""

_FOLDER = "baselines"
_SUFFIX = ".json.gz"
_NAME = re.compile(r"torch-(\d+\.\d+)(\.\d+)?\Z")
_MAX_BYTES = 16 * 2**20


class UnknownBaseline(ReportError):
    """A name of a stock baseline that is not there; comparing with another version would mislead."""


def names() -> tuple[str, ...]:
    """Return the names of the stored baselines of stock PyTorch, the oldest version first."""
    folder = fixture_folder(_FOLDER)
    found = [path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")] if folder else []
    return tuple(sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]))


def read(path: str | Path, torch: str) -> tuple[Report, str]:
    """Return the report or baseline that `path` is or names, and what to call it; raises ReportError.

    `stock` is the stored baseline of the release of `torch` (a version), and `torch-2.12.1` that of 2.12; a file of
    that name comes first.
    """
    if os.path.exists(path):
        try:
            return document.read(path), Path(path).name
        except WrongKind:
            return _read(Path(path)), Path(path).name
    name = _resolved(Path(path).name, torch)
    folder = fixture_folder(_FOLDER)
    if name is None or folder is None:
        return document.read(path), Path(path).name
    return _read(folder / f"{name}{_SUFFIX}"), name


def _resolved(name: str, torch: str) -> str | None:
    """Return which stored baseline a name means, None where it is no such name."""
    found = _NAME.match(name)
    if name != STOCK and found is None:
        return None
    wanted = release(torch) if found is None else found[1]
    stored = [one for one in names() if (version := _NAME.match(one)) is not None and version[1] == wanted]
    if not stored:
        raise UnknownBaseline(f"there is no stock baseline of torch {wanted}; there are {', '.join(names()) or 'none'}")
    return stored[-1]


def _read(file: Path, *, whole: bool = False) -> Report:
    """Read the baseline in `file`, and the stored one that it is told by the difference to; `whole` allows none."""
    try:
        written = load(file, "a baseline", _MAX_BYTES)
        if not isinstance(written, dict) or written.get("schema") != KIND:
            raise WrongKind(f'neither a report nor a baseline: its "schema" is not {SCHEMA!r} or {KIND!r}')
        base, without = written.pop("base", None), written.pop("without", [])
        if base is None:
            return document.parse({**written, "schema": SCHEMA})
        folder = fixture_folder(_FOLDER)
        if whole or folder is None or base not in names():
            raise UnknownBaseline(f"it is told by the difference to {str(base)[:40]!r}, which is no stored baseline")
        return _joined(
            _read(folder / f"{base}{_SUFFIX}", whole=True), written, document.decoded(tuple[str, ...], without)
        )
    except ReportError as error:
        raise type(error)(f"{file}: {error}") from None


def _joined(base: Report, written: dict[str, Any], without: tuple[str, ...]) -> Report:
    """Return the report of which `written` has what the report `base` has not, or has otherwise."""
    # Contracts of the base stand for those that the difference leaves out.
    header = document.decoded(dict[str, object], written.get("header"))
    own = document.decoded(tuple[Contract, ...], header.get("contracts"))
    dropped = {*without, *(contract.id for contract in own)}
    contracts = [*own, *(contract for contract in base.header.contracts if contract.id not in dropped)]
    report = document.parse({**written, "schema": SCHEMA, "header": {**header, "contracts": contracts}})
    dropped |= {case.id for case in report.cases}
    kept = (case for case in base.cases if case.id not in dropped and case.contract in report.contracts)
    return replace(report, cases=(*report.cases, *kept))


def render(report: Report, base: str | None = None) -> bytes:
    """Return the baseline of a report: the verdict of each case, without evidence; the same bytes each time.

    With `base`, the name of a stored baseline, only what differs from it is written. Raises ReportError.
    """
    footer = report.footer
    if footer is None or footer.interrupted:
        raise WrongKind("the run did not end (INCOMPLETE), and is no baseline")
    header = replace(report.header, contracts=tuple(map(_stated, report.header.contracts)), variables={})
    ending = replace(footer, contracts={}, waivers=(), health=(), baseline=None, digest=None, self_check=None)
    small = replace(report, header=header, cases=tuple(map(_judged, report.cases)), footer=ending)
    more: dict[str, Any] = {"schema": KIND}
    if base is not None:
        small, without = _difference(small, base)
        more |= {"base": base, "without": without}
    text = json.dumps({**layout.folded(small), **more}, separators=(",", ":"), sort_keys=True)
    return gzip.compress(text.encode("ascii"), compresslevel=9, mtime=0)


def _difference(report: Report, base: str) -> tuple[Report, list[str]]:
    """Return what of a report a stored baseline has not, or has otherwise, and the ids that only that one has."""
    folder = fixture_folder(_FOLDER)
    if folder is None or base not in names():
        raise UnknownBaseline(f"there is no stored baseline {base!r}; there are {', '.join(names()) or 'none'}")
    there = _read(folder / f"{base}{_SUFFIX}", whole=True)
    contracts = tuple(row for row in report.header.contracts if there.contracts.get(row.id) != row)
    known = {case.id: case for case in there.cases}
    cases = tuple(case for case in report.cases if known.get(case.id) != case)
    ids = {*report.contracts, *(case.id for case in report.cases)}
    without = sorted({*there.contracts, *known} - ids)
    # The cases of a contract that is not there are not there either.
    without = [id for id in without if "[" not in id or id.split("[")[0] in report.contracts]
    return replace(report, header=replace(report.header, contracts=contracts), cases=cases), without


def _stated(contract: Contract) -> Contract:
    return replace(contract, statement="", source="", failure="", next_step="")


def _judged(case: Case) -> Case:
    return replace(case, node=None, reason="", detail=None, evidence=(), snippet=None, waiver=None, duration_s=0.0)
