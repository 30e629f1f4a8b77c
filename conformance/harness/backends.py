"""What third parties say of their devices: modules to import first, op policies, what they lack, known divergences.

A package of a backend says it once, by an entry point of the group `amp_conformance.backends` whose name is the device
type and whose object is a mapping: `op_policy` ("like:cuda", or "surface:FILE:cuda" with the whole path of FILE),
`capabilities`, a mapping from each of targets.CAPABILITIES that the device lacks to the reason, and `waivers`, the path
of a file of waivers, which are the known divergences.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..oracles.policy import overloads
from ..oracles.policy.declaration import Declaration
from ..report.document import ReportError
from .options import declaration
from .targets import CAPABILITIES, Target, is_foreign

GROUP = "amp_conformance.backends"
_KEYS = ("op_policy", "capabilities", "waivers")


class BackendError(ValueError):
    """A module, a declaration or an entry point that cannot be taken at its word; the message is one line."""


@dataclass(frozen=True)
class Declared:
    """What is declared of the run's devices, by device type: op policies, and capabilities that they lack with reasons.

    `waivers` are the files of waivers that packages ship.
    """

    op_policies: Mapping[str, Declaration]
    lacks: Mapping[str, Mapping[str, str]]
    waivers: tuple[Path, ...]


def import_first(modules: Iterable[str], here: Path) -> None:
    """Import modules, also from the folder `here`; raises BackendError with what went wrong."""
    for name in modules:
        try:
            if str(here) not in sys.path:
                sys.path.append(str(here))
            importlib.import_module(name)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            raise BackendError(f"--import: {name}: {type(error).__name__}: {text[0]}") from None


def declared(asked: Iterable[tuple[str | None, Declaration]], targets: Iterable[Target]) -> Declared:
    """Return what is declared of the device types of `targets`, where the user's words come before a package's."""
    without = dict.fromkeys(target.device_type for target in targets if is_foreign(target.device_type))
    policies: dict[str, Declaration] = {}
    lacks: dict[str, dict[str, str]] = {}
    files: list[Path] = []
    for device_type in without:
        for entry in entry_points(group=GROUP, name=device_type):
            said = _said(entry)
            if "op_policy" in said:
                policies[device_type] = _whole(_own(entry, said["op_policy"]))
            lacks.setdefault(device_type, {}).update(_lacks(entry, said.get("capabilities", {})))
            if "waivers" in said:
                files.append(Path(said["waivers"]))
    for name, asked_for in asked:
        chosen = list(without) if name is None else [name]
        if name is not None and name not in without:
            has = "is no device of this run" if is_foreign(name) else "has lists of its own"
            raise BackendError(f"--op-policy: {name} {has}")
        if not chosen:
            raise BackendError("--op-policy: every device of this run has op lists of its own")
        _check(asked_for, "--op-policy")
        policies.update(dict.fromkeys(chosen, _whole(asked_for)))
    return Declared(policies, lacks, tuple(files))


def _own(entry: EntryPoint, given: Any) -> Declaration:
    where = f"{_where(entry)}: op_policy"
    try:
        said = declaration(str(given), Path())
    except ReportError as error:
        raise BackendError(f"{where}: {error}") from None
    if said is None:
        raise BackendError(f"{where}: {str(given)[:80]!r} is not like:BACKEND (like:cuda) or surface:FILE:BACKEND")
    _check(said, where)
    return said


def _lacks(entry: EntryPoint, given: Any) -> dict[str, str]:
    where = f"{_where(entry)}: capabilities"
    if not isinstance(given, Mapping):
        raise BackendError(
            f"{where}: a {type(given).__name__}, and no mapping from what the device lacks to the reason"
        )
    known = ", ".join(CAPABILITIES)
    for name, reason in given.items():
        if name not in CAPABILITIES:
            raise BackendError(f"{where}: {str(name)[:80]!r} is no capability; there are {known}")
        if not isinstance(reason, str) or not reason.strip():
            raise BackendError(
                f"{where}: {name} has {str(reason)[:80]!r} in place of the reason why the device lacks it"
            )
    return {name: reason.strip() for name, reason in given.items()}


def _check(said: Declaration, where: str) -> None:
    if said.backend not in overloads.BACKENDS:
        known = ", ".join(overloads.BACKENDS)
        raise BackendError(f"{where}: there are no op lists of {said.backend[:80]!r}; there are {known}")


def without_lists(targets: Iterable[Target]) -> dict[str, Declaration]:
    """Return by device type the own rules of torch's backends that the op reference has no lists for (MPS)."""
    types = {target.device_type for target in targets if not target.is_fake}
    return {one: _whole(Declaration(one)) for one in types if overloads.without_lists(one)}


def _whole(said: Declaration) -> Declaration:
    """Say of a surface, and of a backend without lists, also which overloads it leaves out, and what it changes."""
    if said.surface is not None:
        whole = {**dict.fromkeys(overloads.known(said.backend), overloads.UNLISTED), **said.overloads}
        return replace(said, overloads=whole, changed=overloads.other_rules(whole, said.backend))
    if not overloads.without_lists(said.backend):
        return said
    rules, changed = overloads.own_rules(said.backend)
    return replace(said, overloads=rules, changed=changed)


def _where(entry: EntryPoint) -> str:
    return f"the entry point {entry.name} of {GROUP} ({entry.value})"


def _said(entry: EntryPoint) -> Mapping[str, Any]:
    where = _where(entry)
    try:
        found = entry.load()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise BackendError(f"{where} cannot be loaded: {type(error).__name__}: {text[0]}") from None
    if not isinstance(found, Mapping):
        raise BackendError(f"{where} is a {type(found).__name__} and no mapping")
    if unknown := sorted(str(key) for key in found if key not in _KEYS):
        raise BackendError(f"{where} has {unknown[0]!r}, and there are {', '.join(_KEYS)}")
    return found
