"""The numerics fingerprint of a device as evidence of a report: as a table, in a line, and compared with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from . import text
from .document import WrongTypes
from .values import Case, Evidence, Report

UNIT = "numerics fingerprint"
"""The unit of evidence that is a section of a fingerprint: its name, and a list of pairs of row and value."""

# Rows that name software and instructions: they explain a difference, and are none of the arithmetic.
_SOFTWARE = ("instructions", "libraries")
_DTYPES = ("fp16", "bf16", "fp32")
_SUBNORMAL = ("subnormal operands", "subnormal products", "subnormal results")


@dataclass(frozen=True)
class Fingerprint:
    """What a device's arithmetic does: by section (`fp16`, `bf16`, `fp32`, `machine`) the rows and their values."""

    target: str
    sections: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Difference:
    """A row that differs; `old` or `new` is "not measured" where one of the two lacks it."""

    target: str
    row: str
    old: str
    new: str

    @property
    def arithmetic(self) -> bool:
        """Whether results may differ by it; another version of a library alone says nothing of them."""
        return self.row not in _SOFTWARE

    def __str__(self) -> str:
        return f"{self.row}: {self.old} -> {self.new}"


def fingerprints(report: Report) -> dict[str, Fingerprint]:
    """Return the fingerprints of a report by the slot of their target; raises WrongTypes for one that is none."""
    slots = {target.name: target.slot for target in report.header.targets}
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for case, evidence in _evidence(report):
        sections.setdefault(case.target, {})[text.line(evidence.name)] = _rows(case, evidence)
    return {slots.get(target, target): Fingerprint(text.line(target), found) for target, found in sections.items()}


def _evidence(report: Report) -> Iterator[tuple[Case, Evidence]]:
    for case in report.cases:
        for evidence in case.evidence:
            if evidence.unit == UNIT:
                yield case, evidence


def _rows(case: Case, evidence: Evidence) -> dict[str, str]:
    pairs = evidence.measured
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
    ):
        raise WrongTypes(f"the case {case.id}: {evidence.name!r} is no section of a fingerprint: not pairs of texts")
    return {text.line(row): text.line(value) for row, value in pairs}


def render(found: Fingerprint, *, width: int = 100) -> str:
    """Return the fingerprint as a table of row and dtype, and below it what is of the whole machine."""
    # The harness imports this module before it can say that a package is missing.
    from tabulate import tabulate

    dtypes = [name for name in _DTYPES if name in found.sections]
    rows = list(dict.fromkeys(row for name in dtypes for row in found.sections[name]))
    column = max(12, (width - max(map(len, rows), default=0) - 2 * len(dtypes)) // max(len(dtypes), 1))
    title = f"Numerics fingerprint of {found.target}"
    parts = [f"{title}\n{'-' * len(title)}"]
    if rows:
        body = [[row, *(text.wrap(found.sections[name].get(row, "-"), column) for name in dtypes)] for row in rows]
        parts.append(tabulate(body, headers=["", *dtypes], tablefmt="simple", disable_numparse=True))
    for name, section in found.sections.items():
        if name not in _DTYPES:
            parts.append("\n".join(text.wrap(f"{row}: {value}", width, "", "  ") for row, value in section.items()))
    return "\n\n".join(parts)


def brief(found: Fingerprint) -> str:
    """Return what matters most of a fingerprint in one line."""
    words = []
    for name in _DTYPES:
        if section := found.sections.get(name):
            flushed = sorted({section[row] for row in _SUBNORMAL if section.get(row, "kept") != "kept"})
            subnormal = f", subnormals {' and '.join(flushed)}" if flushed else ""
            split = section.get("partial sums", "none")
            partial = "" if split in ("none", section.get("accumulator")) else f", partial sums {split}"
            words.append(f"{name} sums in {section.get('accumulator', 'not measured')}{partial}{subnormal}")
    return f"numerics of {found.target}: {'; '.join(words)}"


def differences(old: Report, new: Report) -> list[Difference]:
    """Return the rows that differ between the fingerprints of two reports, of the targets that both have one of."""
    there, here = fingerprints(old), fingerprints(new)
    return [difference for slot, found in here.items() if slot in there for difference in compared(there[slot], found)]


def compared(old: Fingerprint, new: Fingerprint) -> list[Difference]:
    """Return the rows that differ between two fingerprints, in the order of the newer one."""
    found = []
    for section in dict.fromkeys([*new.sections, *old.sections]):
        there, here = old.sections.get(section, {}), new.sections.get(section, {})
        for row in dict.fromkeys([*here, *there]):
            if there.get(row) != here.get(row):
                named = row if section not in _DTYPES else f"{section} {row}"
                values = (side.get(row, "not measured") for side in (there, here))
                found.append(Difference(new.target, named, *values))
    return found
