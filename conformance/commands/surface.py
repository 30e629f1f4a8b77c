"""The command `surface`: write the autocast surface of this torch, compare two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..report import surface, surface_diff
from .console import DIFFERENT, OK, UsageError, show, width, write
from .torch_surface import read


def add(commands: Any) -> None:
    """Add `surface` to the parser's commands."""
    command = commands.add_parser(
        "surface",
        help="write what this torch registers, documents and does under autocast; compare two such files",
        description="Without `diff`: write the autocast surface of this torch, which takes seconds and no GPU.",
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
    page = surface.render(read())
    if arguments.output is not None:
        return write(Path(arguments.output), page)
    show(page.rstrip("\n"))
    return OK


def _surface_diff(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        raise UsageError("--output is for the surface of this torch; the comparison goes to standard output")
    old, new = surface.read(arguments.old), surface.read(arguments.new)
    show(surface_diff.render(old, new, names=(arguments.old, arguments.new), width=width()))
    return DIFFERENT if surface_diff.changes(old, new) else OK
