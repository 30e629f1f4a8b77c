"""The program of a case: the check itself, its parameters, and all that it uses of the suite, without the suite."""

from __future__ import annotations

import ast
import base64
import contextlib
import inspect
import io
import re
import sys
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...data import fixture, read_toml
from ..check import Case
from ..items import Facts
from ..state import kept
from ..targets import Target
from . import definitions, literals, stand_ins
from .definitions import CannotCopy, File

LONGEST = 150_000
"""Characters of a program; what would be longer (a whole data set) is not written."""

IN_SHORT = "in short:"
"""The line of a program's head under which the check's own, shorter account stands."""

_REASON_LENGTH = 300
_JUDGES = "raise SystemExit"
_GIVEN = ("case", "target", "rng")
_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.complex128)  # those that devices are known to lack


def of(item: Any, found: Facts, case: Case, seed: int, reason: str) -> str:
    """Return the program of a failed case: the check's own snippet if it fails here, or a copy of the check.

    Where neither can be had, return the own snippet or that of the catalogue, and say in it that it is not of the case.
    """
    own = None if case.snippet is None else case.reproduction
    if own is not None and _fails(own):
        return _verbatim(own)
    where = "host" if found.target is None else found.target.name
    title = f"{found.id} on {where}, torch {torch.__version__}\npromised: {case.contract.title}\nseen: {_line(reason)}"
    if own is not None:
        title += f"\n{IN_SHORT}\n{textwrap.indent(own, '    ')}"
    try:
        text = written(
            item.function,
            title=title,
            case=case,
            target=found.target,
            given={**item.funcargs, **found.parameters},
            fixtures=tuple(item.fixturenames),
            seed=seed,
            leaks="leaves state behind" in reason,
        )
        return _verbatim(text)
    except Exception as error:  # a broken torch may raise anything where it is only looked at
        why = str(error) if isinstance(error, CannotCopy) else "it cannot be written here"
        head = f"{found.id} on {where}: no program of this very case, which needs more than torch ({_line(why)});"
        return f"# {head}\n# this is of its contract, and does not fail by itself\n{case.reproduction}"


def importing(text: str, modules: Sequence[str]) -> str:
    """Return a program that first imports modules, as the run did: without them torch may not know the device."""
    head = re.match(r"(?:#.*\n|\s*\n|from __future__ .*\n)*", text)
    start = head.end() if head is not None else 0
    return text[:start] + "".join(f"import {name}\n" for name in modules) + text[start:]


def _verbatim(text: str) -> str:
    """Return the template of which this text comes: `$` is one in a program, and in data that it holds."""
    return text.replace("$", "$$")


def _fails(snippet: str) -> bool:
    """Whether a snippet that judges fails in this process, as it has to where the case failed."""
    if _JUDGES not in snippet:
        return False
    with kept(), contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(snippet, "<snippet>", "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit):
            return True
    return False


def _line(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= _REASON_LENGTH else f"{words[:_REASON_LENGTH]}..."


def written(
    check: Callable[..., None],
    *,
    title: str,
    case: Case,
    target: Target | None,
    given: Mapping[str, Any],
    fixtures: tuple[str, ...],
    seed: int,
    leaks: bool,
) -> str:
    """Return the program of a case; raises CannotCopy where torch alone cannot run it.

    `given` are its arguments, `fixtures` the names of all that it asks for or uses. `leaks` is whether the case failed
    by the state that it left.
    """
    file = File()
    arguments = {name: _argument(file, name, check, given) for name in inspect.signature(check).parameters}
    stand_in = stand_ins.__name__
    lines = []
    if "one_thread" in fixtures or "_one_thread" in fixtures:
        lines.append(f"{file.outside('import torch', 'torch')}.set_num_threads(1)")
    lines.append(f"{file.value(stand_in, 'seed_everything')}({seed})")
    if leaks:
        lines.append(f"before = {file.value(f'{definitions.PACKAGE}.harness.state', 'Snapshot')}()")
    amp_dtypes = literals.source(file, case.amp_dtypes)
    lines.append(
        f"case = {file.value(stand_in, 'Case')}({case.contract.id!r}, {case.level!r}, {case.seed}, {amp_dtypes})"
    )
    if target is not None:
        lines.append(f"target = {_target(file, target)}")
    if "rng" in arguments:
        lines.append(f"rng = {file.outside('import torch', 'torch')}.Generator().manual_seed({seed})")
    called = file.value(check.__module__, check.__name__)
    call = f"{called}({', '.join(f'{name}={value}' for name, value in arguments.items())})"
    current = "with target.current():\n    " if target is not None and target.index and not target.is_fake else ""
    lines += [f"{current}{call}"]
    if leaks:
        lines += ["if before.leaks():", '    raise SystemExit(f"the case leaves state behind: {before.leaks()}")']
    lines += ["if case.broken:", "    raise SystemExit(case.broken)", 'print("holds")']
    main = "\n".join(lines)
    text = file.text(main, LONGEST)
    if "probe" not in file.attributes and target is not None:
        text = text.replace(f", {_probe(file, target)})\n", ", {})\n")
    if file.files:
        data = "\n".join(f"FILES[{name!r}] = {_data(name)!r}" for name in sorted(file.files))
        if len(data) + len(text) > LONGEST:
            raise CannotCopy(f"the data of {', '.join(sorted(file.files))}")
        text = _with_data(text, data)
    return f"{textwrap.indent(title, '# ', lambda line: True)}\n{text}"


def _argument(file: File, name: str, check: Callable[..., None], given: Mapping[str, Any]) -> str:
    if name in _GIVEN:
        return name
    if callable(getattr(sys.modules[check.__module__], name, None)):
        return f"{file.value(check.__module__, name)}()"  # a fixture of the module
    if name not in given:
        raise CannotCopy(f"what the check is given as {name}")
    return literals.source(file, given[name])


def _target(file: File, target: Target) -> str:
    made = file.value(stand_ins.__name__, "Target")
    return f"{made}({target.name!r}, {target.device_type!r}, {target.index}, {target.is_fake}, {_probe(file, target)})"


def _probe(file: File, target: Target) -> str:
    facts = {
        **target.probe,
        "without": [str(dtype) for dtype in _DTYPES if not target.computes_in(dtype)],
    }
    return literals.source(file, facts)


def _data(name: str) -> Any:
    path = fixture(name)
    if path.suffix == ".toml":
        return read_toml(path)
    return base64.b85encode(zlib.compress(path.read_bytes(), 9)).decode()


def _with_data(text: str, data: str) -> str:
    """Put the data behind the dictionary that holds it, before any definition reads it."""
    tree = ast.parse(text)
    node = next(one for one in tree.body if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "FILES")
    lines = text.split("\n")
    return "\n".join([*lines[: node.end_lineno], data, *lines[node.end_lineno :]])
