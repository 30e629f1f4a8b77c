"""Waivers: written excuses for known failures, and what becomes of each in a run."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from ..data import fixture
from . import targets
from .tables import Table, rows_of

_REQUIRED = {"contract", "cases", "reason", "owner", "link", "expires"}
BUILDS = ("cuda", "hip")
CPUS = ("AVX2", "AVX512", "SVE256")
"""The builds of torch for devices that are named cuda."""
_OPTIONAL = {"torch", "target", "varies", "kernels", "evidence", "run", "build", "cpu"}


class WaiverError(ValueError):
    """A waiver file that cannot be taken at its word; nothing is run under it."""


@dataclass(frozen=True)
class Waiver:
    """One excuse: which cases of which contract, under which conditions, why, whose, and until when.

    `varies` says on what, other than the version and the target, the failure depends: a case that passes is no sign
    then that the waiver is not needed. `kernels` are operators whose kernels in torch are at fault: a device of a third
    party that has none of its own runs those, the CPU's or one made of other operators. `evidence` are patterns over
    what may fail in a case; the rest of it is judged. Without `run` a case is not run, as it would end the process or
    leave the device unusable. `build` is the kind of build whose libraries are at fault, "cuda" or "hip": devices of
    both are named cuda. `cpu` are the instructions for which the kernels at fault are written, as
    torch.backends.cpu.get_cpu_capability names them. `shipped` waivers are of what stock PyTorch breaks.
    """

    contract: str
    cases: tuple[str, ...]
    reason: str
    owner: str
    link: str
    expires: datetime.date
    torch: str = ""
    targets: tuple[str, ...] = ("*",)
    varies: str = ""
    kernels: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ("*",)
    run: bool = True
    build: str = ""
    cpu: str = ""
    shipped: bool = False

    def in_conditions(self, torch_version: str, target: str) -> bool:
        """Whether the waiver's conditions hold for a case on `target` under `torch_version`."""
        device_type = target if target.startswith("fake:") else target.split(":")[0]
        return _within(self.torch, torch_version) and any(
            fnmatchcase(name, pattern) for name in (target, device_type) for pattern in self.targets
        )

    def about_kernels_of(self, torch_version: str, device_type: str) -> bool:
        """Whether a device of a third party runs torch's kernels that are at fault, as it has none of its own."""
        return (
            bool(self.kernels)
            and _within(self.torch, torch_version)
            and targets.is_foreign(device_type)
            and not any(targets.has_kernel(device_type, name) for name in self.kernels)
        )

    def speaks_of(self, target: str) -> bool:
        """Whether a pattern names the target, or its device type, and not every one."""
        names = (target, target.split(":")[0])
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.targets if pattern != "*")

    def names(self, contract: str, case: str) -> bool:
        """Whether the waiver names this case of this contract."""
        return contract == self.contract and any(_like(case, pattern) for pattern in self.cases)

    def excuses(self, failure: str) -> bool:
        """Whether the waiver is about a failure, which is named as its evidence is, or by what was raised."""
        return any(_like(failure, pattern) for pattern in self.evidence)

    def excuses_a_part(self, failure: str) -> bool:
        """Whether the waiver names this failure, and not whatever may fail in a case: the rest of it is judged."""
        return self.evidence != ("*",) and self.excuses(failure)

    def expired(self, today: datetime.date) -> bool:
        """Whether the waiver has ended; its last day still counts."""
        return today > self.expires


@functools.cache
def _within(bounds: str, torch_version: str) -> bool:
    """Whether a version lies within bounds: asked for each waiver and target, of a few distinct ones."""
    return SpecifierSet(bounds).contains(Version(Version(torch_version).base_version), prereleases=True)


def _like(case: str, pattern: str) -> bool:
    # A case id holds brackets, which fnmatch would read as a character set.
    return fnmatchcase(case, pattern.replace("[", "[[]"))


def _waiver(where: str, row: dict[str, Any], known: Iterable[str]) -> Waiver:
    table = Table(where, row, WaiverError)
    table.keys(_REQUIRED, _OPTIONAL)
    table.texts(*sorted(set(row) - {"cases", "expires", "target", "kernels", "evidence", "run"}))
    table.lists("cases", of='patterns over case ids, such as ["*"]')
    table.lists("target", of='patterns over targets, such as ["cpu", "fake:*"]')
    table.lists("kernels", of='operators, such as ["aten::mm"]')
    table.lists("evidence", of='patterns over the names of evidence, such as ["fp16*"]')
    table.dates("expires")
    if row.get("build", "cuda") not in BUILDS:
        table.refuse(f"build must be one of {', '.join(BUILDS)}")
    if row.get("cpu", CPUS[0]) not in CPUS:
        table.refuse(f"cpu must be one of {', '.join(CPUS)}")
    if row.get("run", False) is not False:
        table.refuse("run must be false: a case runs unless a waiver says that it must not")
    if "run" in row and "evidence" in row:
        table.refuse("a case that is not run has no evidence to name")
    for pattern in row.get("target", []):
        if not set(pattern) & set("*?[") and not targets.known(pattern):
            table.refuse(f"there is no target {pattern!r}")
    try:
        SpecifierSet(row.get("torch", ""))
    except InvalidSpecifier:
        table.refuse('torch must be version bounds such as ">=2.6,<2.14"')
    if row["contract"] not in set(known):
        table.refuse(f"matches nothing: there is no contract {row['contract']!r}")
    words = {key: row[key] for key in ("contract", "reason", "owner", "link", "expires")}
    return Waiver(
        **words,
        cases=tuple(row["cases"]),
        torch=row.get("torch", ""),
        targets=tuple(row.get("target", [] if "kernels" in row else ["*"])),
        varies=row.get("varies", ""),
        kernels=tuple(row.get("kernels", [])),
        evidence=tuple(row.get("evidence", ["*"])),
        run=row.get("run", True),
        build=row.get("build", ""),
        cpu=row.get("cpu", ""),
    )


def read(path: Path, known: Iterable[str]) -> tuple[Waiver, ...]:
    """Read the waiver file at `path` for the `known` contract ids; raises WaiverError in one line."""
    known = set(known)
    return tuple(_waiver(where, row, known) for where, row in rows_of(path, "waiver", "a waiver file", WaiverError))


def shipped(known: Iterable[str]) -> tuple[Waiver, ...]:
    """Return the waivers that the suite ships: what stock PyTorch is known to break."""
    return tuple(replace(waiver, shipped=True) for waiver in read(fixture("waivers.toml"), known))


def today() -> datetime.date:
    """Return the date that waivers are held against."""
    return datetime.datetime.now(datetime.timezone.utc).date()
