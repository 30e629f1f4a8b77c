"""Values of evidence: reduced to what JSON can hold, and shown in a message."""

from __future__ import annotations

import math
from typing import Any

from ..report.values import Evidence


def sentence(evidence: Evidence) -> str:
    """Return a piece of evidence in one line: `relative error: 0.25 u, NOT <= 0.125 u`."""
    unit = f" {evidence.unit}" if evidence.unit else ""
    measured = f"{evidence.name}: {_show(evidence.measured)}{unit}"
    if evidence.relation is None:
        return measured
    sign = "" if evidence.holds else "NOT "
    relation = {"in": "between", "identical": "bit for bit"}.get(evidence.relation, evidence.relation)
    return f"{measured}, {sign}{relation} {_show(evidence.bound)}{unit}"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) > 12:
        return f"[{', '.join(map(_show, value[:12]))}, ... {len(value)} in all]"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


def plain(value: Any) -> Any:
    """Turn `value` into what JSON can hold: scalars and nested lists; floats that are not finite become texts."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, dict):
        return [f"{plain(key)}: {plain(item)}" for key, item in value.items()]
    return _text(value)


def _text(value: Any) -> str:
    """Return `str(value)`: torch prints a tensor in float64, of which a third party's device may refuse all tensors."""
    try:
        return str(value)
    except (RuntimeError, TypeError):
        if not hasattr(value, "is_cpu"):
            raise
    return str(value.cpu())
