"""Evidence: one number or fact that a case measured, with what it was held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Evidence:
    """What was measured; `relation` and `bound` are None for a fact that nothing is held against.

    `measured` and `bound` are what `plain` makes of a value.
    """

    name: str
    measured: Any
    relation: str | None
    bound: Any
    unit: str
    holds: bool

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.relation is None:
            return f"{self.name}: {_show(self.measured)}{unit}"
        sign = "" if self.holds else "NOT "
        relation = {"in": "between", "identical": "bit for bit"}.get(self.relation, self.relation)
        return f"{self.name}: {_show(self.measured)}{unit}, {sign}{relation} {_show(self.bound)}{unit}"


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
    return str(value)
