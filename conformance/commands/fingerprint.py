"""The command `fingerprint`: how a device sums, rounds and treats subnormals."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..report import document, fingerprint
from .console import OK, UsageError, show, width
from .devices import real_target


def add(commands: Any) -> None:
    """Add `fingerprint` to the parser's commands."""
    command = commands.add_parser(
        "fingerprint",
        help="show how a device sums, rounds and treats subnormals: measured now, or stored in a report",
        description="Without REPORT: measure the numerics fingerprint of a device with the torch at hand, in about a "
        "second. With it: show the fingerprints that the report holds, which needs no torch.",
    )
    command.add_argument("report", nargs="?", metavar="REPORT", help="the report that holds the fingerprint")
    command.add_argument("--device", metavar="D", help="the device to measure: cpu (the default), cuda:1, xpu, mps")
    command.add_argument("--json", action="store_true", help="write JSON in place of a table")
    command.set_defaults(run=_fingerprint)


def _fingerprint(arguments: argparse.Namespace) -> int:
    if arguments.report is not None and arguments.device is not None:
        raise UsageError("--device is for measuring; a report has the devices that it has")
    found = _measured(arguments.device or "cpu") if arguments.report is None else _stored(arguments.report)
    if arguments.json:
        show(json.dumps({one.target: one.sections for one in found}, indent=2, ensure_ascii=False))
    else:
        show("\n\n".join(fingerprint.render(one, width=width()) for one in found))
    return OK


def _stored(path: str) -> list[fingerprint.Fingerprint]:
    found = list(fingerprint.fingerprints(document.read(path)).values())
    if not found:
        raise UsageError(f"{document.locate(path)}: the report holds no fingerprint (chapter numerics records it)")
    return found


def _measured(name: str) -> list[fingerprint.Fingerprint]:
    target = real_target(name)
    import torch

    from ..measure import fingerprint as probe

    dtypes = tuple(dtype for dtype in probe.NAMES.values() if dtype is torch.float32 or target.supports(dtype))
    return [fingerprint.Fingerprint(target.name, probe.fingerprint(target.device, dtypes))]
