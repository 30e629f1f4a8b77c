"""The commands that look at the torch at hand, `surface` and `ops`; they need no GPU."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..harness import requirements
from ..report import ops, surface, surface_diff
from .console import DIFFERENT, OK, UsageError, show, width, write

_NO_DISPATCHER = (
    "this torch no longer has the private functions of its dispatcher that tell which ops autocast ({error}); "
    "update the suite"
)


def add_commands(commands: Any) -> None:
    """Add `surface` and `ops` to the parser's commands."""
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

    command = commands.add_parser(
        "ops",
        help="say in what precision ops run under autocast in this torch",
        description="A table of op and backend with the rule in force in this torch, as observed on fake tensors; "
        "needs no GPU. Each option may be given more than once.",
    )
    command.add_argument(
        "--op", action="append", metavar="NAME", help="an op as called: layer_norm, GRUCell, F.linear, @"
    )
    command.add_argument("--backend", action="append", metavar="B", help=f"one of {', '.join(surface.BACKENDS)}")
    command.add_argument(
        "--policy", action="append", metavar="P", help=f"one of {', '.join(surface.POLICIES)}; fp32 takes all three"
    )
    command.add_argument("--undocumented", action="store_true", help="only rules that PyTorch's AMP page does not list")
    command.set_defaults(run=_ops)


def _surface(arguments: argparse.Namespace) -> int:
    page = surface.render(_read())
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


def _ops(arguments: argparse.Namespace) -> int:
    backends = _chosen("backend", arguments.backend, surface.BACKENDS)
    policies = _chosen("policy", arguments.policy, surface.POLICIES) if arguments.policy else ()
    asked = [_asked(spelling) for spelling in dict.fromkeys(arguments.op or ())]
    wanted = {overload for one in asked for overload in one.overloads} if asked else None
    found = _read(wanted)
    with _reader() as reader:
        view = ops.View(found, backends, reader.page_ops, policies, arguments.undocumented)
    pages = [ops.answer(view, one, width=width()) for one in asked] or [ops.table(view, width=width())]
    show("\n\n".join(pages))
    return OK


def _asked(spelling: str) -> ops.Asked:
    """What ATen has under a name that the user gave; raises UsageError with the nearest where it has nothing."""
    with _reader() as reader:
        overloads = reader.stands_for(spelling)
        if overloads is None:
            near = _nearest(spelling, reader.spellings()) or "; nothing in torch has a name like it"
            raise UsageError(f"unknown op {spelling!r}{near}")
        pairs = ((overload, backend) for overload in overloads for backend in surface.BACKENDS)
        return ops.Asked(spelling, overloads, frozenset(pair for pair in pairs if reader.indirect(_target_of(), *pair)))


def _read(only: Collection[str] | None = None) -> surface.Surface:
    """Run the overloads of the torch at hand."""
    with _reader() as reader:
        return surface.parse(reader.read(_target_of(), only=only))


@contextlib.contextmanager
def _reader() -> Iterator[ModuleType]:
    """The module that asks torch, imported on demand; raises UsageError where torch is not there or does not tell.

    What torch warns of, deprecated ops mostly, is of no use to who asks in what precision they run.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (problem := requirements.torch_problem()) is not None:
            raise UsageError(problem)
        from ..oracles.policy import surface as reader

        try:
            yield reader
        except AttributeError as error:
            raise UsageError(_NO_DISPATCHER.format(error=error)) from None


def _target_of() -> Callable[[str], Any]:
    from ..harness import targets

    return targets.resolve


def _chosen(what: str, given: list[str] | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """What the user named, in the order of `allowed`; all of it where nothing is named."""
    for word in given or ():
        if word not in allowed:
            raise UsageError(f"unknown {what} {word!r}{_nearest(word, allowed)}; there are {', '.join(allowed)}")
    return tuple(word for word in allowed if given is None or word in given)


def _nearest(word: str, names: Iterable[str]) -> str:
    spelled = {name.lower(): name for name in sorted(names, reverse=True)}
    near = difflib.get_close_matches(word.lower(), spelled, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(spelled[name] for name in near)}" if near else ""
