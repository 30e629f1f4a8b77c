"""The sample reports of `fixtures/reports/`, as read and as raw JSON to be changed."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from conformance.report import document, layout
from conformance.report.values import Report
from tests.paths import ROOT

FOLDER = ROOT / "fixtures" / "reports"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def path(name: str) -> Path:
    """Return the file of the sample `name`."""
    return FOLDER / f"{name}.json"


def sample(name: str) -> Report:
    """Read the sample `name`."""
    return document.read(path(name))


@functools.cache
def _text(name: str) -> str:
    return path(name).read_text(encoding="utf-8")


def raw(name: str) -> dict[str, Any]:
    """Return the JSON of the sample `name`, a copy that may be changed."""
    loaded: dict[str, Any] = copy.deepcopy(json.loads(_text(name)))
    return loaded


def written(path: Path) -> dict[str, Any]:
    """Return the JSON of the report that a run wrote to `path`, its cases spelled out also where they are folded."""
    whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "cases" in whole:
        return whole
    spelled = layout.spelled_out(whole)
    for case in spelled["cases"]:
        case["evidence"] = list(map(vars, case["evidence"]))
    plain: dict[str, Any] = json.loads(json.dumps(spelled))
    return plain


def changed(name: str, where: str, value: Any) -> dict[str, Any]:
    """Return the JSON of the sample `name` with `value` at the path `where`, as `put` puts it."""
    whole = raw(name)
    put(whole, where, value)
    return whole


def put(whole: dict[str, Any], where: str, value: Any) -> None:
    """Change the JSON `whole` to `value` at the path `where`, its parts divided by slashes (numbers index lists)."""
    *parents, last = (int(part) if part.lstrip("-").isdigit() else part for part in where.split("/"))
    holder: Any = whole
    for part in parents:
        holder = holder[part]
    holder[last] = value
