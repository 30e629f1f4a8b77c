"""The command `surface`: write the autocast surface of this torch, compare two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..report import surface, surface_diff
from .console import DIFFERENT, OK, UsageError, show, width, write
from .devices import foreign_target
from .torch_surface import read, reader


def add(commands: Any) -> None:
    """Add `surface` to the parser's commands."""
    command = commands.add_parser(
        "surface",
        help="write what this torch registers, documents and does under autocast; compare two such files",
        description="Without `diff`: write the autocast surface of this torch, which takes seconds and no GPU. With "
        "--device: what a third party's device registers, in the place of a backend's rules.",
    )
    command.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import what registers the device; may be repeated",
    )
    command.add_argument("--device", metavar="TYPE", help="a third party's device, such as npu")
    command.add_argument(
        "--like",
        metavar="BACKEND",
        choices=surface.BACKENDS,
        help="the backend in whose place the rules of --device stand (default: cuda)",
    )
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.set_defaults(run=_surface)
    actions = command.add_subparsers(dest="action", metavar="diff")
    action = actions.add_parser(
        "diff",
        help="say what changed between two surface files (needs no torch)",
        description="Say what changed between two surface files; needs no torch. "
        "Exit status: 0 nothing changed, 1 something changed, 4 a file that cannot be used.",
    )
    action.add_argument("old", metavar="OLD", help="the surface to compare with")
    action.add_argument("new", metavar="NEW", help="the surface of the newer torch or build")
    action.set_defaults(run=_surface_diff)


def _surface(arguments: argparse.Namespace) -> int:
    with reader():
        device = _device(arguments)
    page = surface.render(read(device=device))
    if arguments.output is not None:
        return write(Path(arguments.output), page)
    show(page.rstrip("\n"))
    return OK


def _device(arguments: argparse.Namespace) -> tuple[str, Any] | None:
    """Return the third party's device that was asked for, and the backend in whose place it stands."""
    if arguments.device is None:
        if arguments.imports or arguments.like:
            raise UsageError("--import and --like are for the device that --device names")
        return None
    return arguments.like or "cuda", foreign_target(arguments.device, arguments.imports)


def _surface_diff(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        raise UsageError("--output is for the surface of this torch; the comparison goes to standard output")
    if arguments.device or arguments.imports or arguments.like:
        raise UsageError("--device, --import and --like are for a surface that is written; diff compares two files")
    old, new = surface.read(arguments.old), surface.read(arguments.new)
    show(surface_diff.render(old, new, names=(arguments.old, arguments.new), width=width()))
    return DIFFERENT if surface_diff.changes(old, new) else OK
