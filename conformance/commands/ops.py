"""The command `ops`: the precision in which ops run under autocast in this torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any

from ..report import ops, surface
from .console import OK, UsageError, show, width
from .torch_surface import read, reader, target_of


def add(commands: Any) -> None:
    """Add `ops` to the parser's commands."""
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


def _ops(arguments: argparse.Namespace) -> int:
    backends = _chosen("backend", arguments.backend, surface.BACKENDS)
    policies = _chosen("policy", arguments.policy, surface.POLICIES) if arguments.policy else ()
    asked = [_asked(spelling) for spelling in dict.fromkeys(arguments.op or ())]
    wanted = {overload for one in asked for overload in one.overloads} if asked else None
    found = read(wanted)
    with reader() as asked_torch:
        view = ops.View(found, backends, asked_torch.page_ops, policies, arguments.undocumented)
    pages = [ops.answer(view, one, width=width()) for one in asked] or [ops.table(view, width=width())]
    show("\n\n".join(pages))
    return OK


def _asked(spelling: str) -> ops.Asked:
    """What ATen has under a name that the user gave; raises UsageError with the nearest where it has nothing."""
    with reader() as asked_torch:
        overloads = asked_torch.stands_for(spelling)
        if overloads is None:
            near = _nearest(spelling, asked_torch.spellings()) or "; nothing in torch has a name like it"
            raise UsageError(f"unknown op {spelling!r}{near}")
        pairs = ((overload, backend) for overload in overloads for backend in surface.BACKENDS)
        return ops.Asked(
            spelling, overloads, frozenset(pair for pair in pairs if asked_torch.indirect(target_of(), *pair))
        )


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
