"""Small autocast surfaces to read, change and compare."""

from __future__ import annotations

import copy
from typing import Any

from conformance.report import surface
from conformance.report.surface import Surface

_EMPTY: dict[str, Any] = {"key": None, "amp_dtype": None, "overloads": {}, "documented": {}, "undetermined": {}}
_SMALL: dict[str, Any] = {
    "kind": "autocast-surface",
    "schema": 1,
    "torch": "2.13.0+cpu",
    "build": {"cuda": None, "hip": None, "xpu": None, "mkldnn": True, "git": "cf30153c" * 5},
    "backends": {
        "cuda": {
            "key": "AutocastCUDA",
            "amp_dtype": "float16",
            "overloads": {"mm": "lower_precision", "sum": "fp32_set_dtype", "exp": "fp32", "_cudnn_rnn": "unknown"},
            "documented": {"mm": "lower_precision", "sum": "fp32", "__matmul__": "lower_precision"},
            "undetermined": {"_cudnn_rnn": "runs on cuDNN alone"},
        },
        "cpu": {
            "key": "AutocastCPU",
            "amp_dtype": "bfloat16",
            "overloads": {"mm": "lower_precision", "qr": "fp32", "cat": "widest"},
            "documented": {"mm": "lower_precision"},
            "undetermined": {},
        },
        "xpu": {
            "key": "AutocastXPU",
            "amp_dtype": "float16",
            "overloads": {"mm": "lower_precision", "exp": "fp32", "binary_cross_entropy": "banned"},
            "documented": {},
            "undetermined": {},
        },
        "mps": _EMPTY,
        "mtia": _EMPTY,
        "maia": _EMPTY,
    },
}
ABSENT = object()


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """Return the small surface as JSON, with other values at paths such as `backends/cuda/key`; ABSENT takes out."""
    whole = copy.deepcopy(_SMALL)
    for where, value in changes:
        *parents, last = where.split("/")
        holder = whole
        for part in parents:
            holder = holder[part]
        if value is ABSENT:
            del holder[last]
        else:
            holder[last] = value
    return whole


def small(*changes: tuple[str, Any]) -> Surface:
    """Read the small surface with such changes."""
    return surface.parse(changed(*changes))
