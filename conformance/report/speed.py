"""The speed-ups of a report: AMP against fp32 on each device, each with its interval and what explains it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..invocation import COMMAND
from . import text
from .document import WrongTypes
from .values import Case, Evidence, Report

UNIT = "speed-up"
"""The unit of evidence that is a speed-up. Its name is the key of the measurement, `subject/size/dtype/baseline`, such
as `matmul/compute/bf16/tf32`; its value a list of pairs of figure and value: `ratio` (times of the baseline over those
of AMP), `low` and `high` (the ends of its interval) at least, `diagnosis` (words) where there is one."""

DIAGNOSIS, SPOILED = "diagnosis", "spoiled"
WIDE = 2.0  # high end over low end: a ratio that may as well be half of what it is
_NEEDED = ("ratio", "low", "high")
# Figures that some devices do not have: their name in the evidence, what it is, and why it is not there.
_UNKNOWN = (
    ("host share", "what the host takes of a step", "no clock separates the device's time from the host's"),
    ("ceiling TFLOP/s", "the highest rate", "no peak of the device is published or can be derived"),
    ("break-even rows", "the rows a weight from which AMP wins", "it follows from the highest rates"),
)
_NUMBER = re.compile(r"\d[\d.]*")
_HEADS = {"fp32": "TF32 off", "tf32": "TF32 on"}


@dataclass(frozen=True)
class Speedup:
    """One comparison of AMP with a baseline: how many times faster it was, between `low` and `high`."""

    case: Case
    subject: str
    size: str
    dtype: str
    baseline: str
    ratio: float
    low: float
    high: float
    figures: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The name of the measurement, the same on every machine."""
        return "/".join((self.subject, self.size, self.dtype, self.baseline))

    @property
    def interval(self) -> str:
        """The ratio with its interval, as a reader sees it."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def doubt(self) -> str:
        """Return why the ratio decides little: what made it invalid, or its wide interval; empty where it is good."""
        if reason := self.figures.get(SPOILED):
            return text.line(str(reason))
        return "" if self.high < WIDE * self.low else "the interval is too wide to say anything"

    @property
    def diagnosis(self) -> str:
        """What explains the ratio, in words; empty where nothing was said, or where the ratio is in doubt."""
        return "" if self.doubt else text.line(str(self.figures.get(DIAGNOSIS, "")))


def speedups(report: Report) -> list[Speedup]:
    """Return the speed-ups of a report in its order, each key once a target; raises WrongTypes for one that is none."""
    found: dict[tuple[str, str], Speedup] = {}
    for case in report.cases:
        for evidence in case.evidence:
            if evidence.unit == UNIT:
                speedup = _speedup(case, evidence)
                found.setdefault((case.target, speedup.key), speedup)
    return list(found.values())


def seen(case: Case, evidence: Evidence) -> str:
    """Return a speed-up in a line: its ratio with its interval, and why it decides little or what explains it."""
    row = _speedup(case, evidence)
    why = f", in doubt: {row.doubt}" if row.doubt else f"; {row.diagnosis}" if row.diagnosis else ""
    return f"{row.key}: AMP is {row.interval} times as fast{why}"


def _speedup(case: Case, evidence: Evidence) -> Speedup:
    where = f"the case {case.id}: {evidence.name!r} is no speed-up"
    pairs = evidence.measured
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise WrongTypes(f"{where}: not pairs of a figure's name and its value")
    figures = dict(pairs)
    parts = evidence.name.split("/")
    if len(parts) != 4 or not all(parts):
        raise WrongTypes(f"{where}: its name does not read subject/size/dtype/baseline")
    ratio, low, high = (_number(where, name, figures.get(name)) for name in _NEEDED)
    if not low <= ratio <= high:
        raise WrongTypes(f"{where}: the ratio {ratio:g} lies outside its interval")
    subject, size, dtype, baseline = map(text.line, parts)
    return Speedup(case, subject, size, dtype, baseline, ratio, low, high, figures)


def _number(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise WrongTypes(f"{where}: {name} is {str(value)[:40]!r}, not a ratio")
    return float(value)


def machine_class(report: Report, slot: str) -> tuple[str, ...]:
    """Return what times and bytes of the target in `slot` depend on: device, capability, processor, threads."""
    target = next((target for target in report.header.targets if target.slot == slot), None)
    if target is None:
        return ()
    named = text.value(target.probe.get("name")), f"capability {text.value(target.probe.get('capability'))}"
    threads = text.value(report.header.flags.get("torch.get_num_threads"))
    return (*named, report.header.environment.cpu, f"{threads} threads")


def other_class(old: Report, new: Report, slot: str) -> str | None:
    """Return how the machines differ on which the target in `slot` was measured, None where they are of one class."""
    there, here = machine_class(old, slot), machine_class(new, slot)
    if there == here:
        return None
    return text.line("; ".join(f"{one} -> {other}" for one, other in zip(there, here, strict=False) if one != other))


def differences(old: Report, new: Report) -> list[str]:
    """Return a line for each speed-up whose interval has no number in common with that of the older report.

    Measurements on machines of different classes are not compared.
    """
    return [
        f"{after.key} on {after.case.target}: {before.interval} -> {after.interval}"
        for before, after in _pairs(old, new)
        if _apart(before, after)
    ]


def not_compared(old: Report, new: Report) -> list[str]:
    """Return a line for each target whose speed-ups are not compared, as they are of another class of machine."""
    slots = {_slot(new, row): row.case.target for row in speedups(new)}
    measured = {_slot(old, row) for row in speedups(old)}
    found = ((target, other_class(old, new, slot)) for slot, target in slots.items() if slot in measured)
    return [f"speed-ups on {text.line(target)} are not compared ({why})" for target, why in found if why is not None]


def differing(old: Report, new: Report) -> dict[str, bool]:
    """Return, by case, whether any of its speed-ups differs by more than both intervals; cases without one are not in.

    The machines are of one class for each of these cases.
    """
    found: dict[str, bool] = {}
    for before, after in _pairs(old, new):
        found[after.case.id] = found.get(after.case.id, False) or _apart(before, after)
    return found


def _pairs(old: Report, new: Report) -> Iterator[tuple[Speedup, Speedup]]:
    """Yield the speed-ups that both reports have of one class of machine, by the place of their target."""
    there, here = ({(_slot(report, row), row.key): row for row in speedups(report)} for report in (old, new))
    for place, row in here.items():
        if place in there and other_class(old, new, place[0]) is None:
            yield there[place], row


def _apart(one: Speedup, other: Speedup) -> bool:
    return one.high < other.low or other.high < one.low


def _slot(report: Report, row: Speedup) -> str:
    return next((target.slot for target in report.header.targets if target.name == row.case.target), row.case.target)


def brief(report: Report) -> list[str]:
    """Return a line for each device: between which ratios its speed-ups lie, against which baseline."""
    lines = []
    for target, every in _by_target(speedups(report)).items():
        rows = [row for row in every if not row.doubt]
        if not rows:
            lines.append(f"AMP on {target}: no speed-up can be stated, as {every[0].doubt}")
            continue
        parts, named = [], _baselines(report, target, rows)
        for baseline in named:
            some = [row for row in rows if row.baseline == baseline]
            least, most = min(some, key=lambda row: row.ratio), max(some, key=lambda row: row.ratio)
            parts.append(
                f"{least.ratio:.2f} ({least.subject}, {least.size}, {least.dtype}) to {most.ratio:.2f} "
                f"({most.subject}, {most.size}, {most.dtype}) times as fast as {named[baseline]}"
            )
        left = f" ({len(every) - len(rows)} more in doubt)" if len(rows) < len(every) else ""
        lines.append(f"AMP on {target}: {'; '.join(parts)}{left}; see {COMMAND} explain speed REPORT")
    return lines


def _baselines(report: Report, target: str, rows: list[Speedup]) -> dict[str, str]:
    """Name the baselines; only on CUDA devices is there a TF32 that could be on or off."""
    cuda = any(text.line(one.name) == target and one.device_type == "cuda" for one in report.header.targets)
    found = dict.fromkeys(row.baseline for row in rows)
    return {one: f"fp32 with {_HEADS.get(one, one)}" if cuda or one != "fp32" else "fp32" for one in found}


def _by_target(rows: list[Speedup]) -> dict[str, list[Speedup]]:
    targets: dict[str, list[Speedup]] = {}
    for row in rows:
        targets.setdefault(text.line(row.case.target), []).append(row)
    return targets


def render(report: Report, *, contracts: tuple[str, ...] = (), width: int = 100) -> str | None:
    """Return a table of the speed-ups of each device and what explains each; None where the report holds none.

    Raises document.ReportError for evidence that claims to be a speed-up and is none.
    """
    rows = [
        row
        for row in speedups(report)
        if not contracts or any(fnmatchcase(row.case.contract, pattern) for pattern in contracts)
    ]
    return (
        "\n\n".join(
            part
            for target, some in _by_target(rows).items()
            for part in _told(target, some, _baselines(report, target, some), width)
        )
        or None
    )


def _told(target: str, rows: list[Speedup], named: Mapping[str, str], width: int) -> Iterator[str]:
    # The harness imports this module before it can say that a package is missing.
    from tabulate import tabulate

    title = f"Speed of AMP on {target}: how many times as fast as fp32, with its interval"
    rows = sorted(rows, key=lambda row: (row.subject.startswith("step"), row.key))
    columns = sorted({(row.dtype, row.baseline) for row in rows}, key=lambda column: (column[0] != "fp16", column))
    heads = [f"{dtype} over {named[baseline]}" for dtype, baseline in columns]
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in rows:
        cells.setdefault((row.subject, row.size), {})[row.dtype, row.baseline] = row.interval + " ?" * bool(row.doubt)
    body = [
        [f"{subject}, {size}", *(found.get(column, "-") for column in columns)]
        for (subject, size), found in cells.items()
    ]
    yield f"{title}\n{'-' * len(title)}\n" + tabulate(
        body, headers=["", *heads], tablefmt="simple", disable_numparse=True
    )
    yield from _reasons({row.key: row.diagnosis for row in rows if row.diagnosis}, width)
    if doubts := list(_doubts(rows, width)):
        yield "\n".join(doubts)
    if unknown := [f"{what} ({why})" for name, what, why in _UNKNOWN if not any(name in row.figures for row in rows)]:
        yield text.wrap(f"Not known on {target}, and left out: {'; '.join(unknown)}.", width, "", "    ")


def _doubts(rows: list[Speedup], width: int) -> Iterator[str]:
    """Why ratios are in doubt, once for those whose reasons differ in their numbers alone."""
    doubts: dict[str, list[Speedup]] = {}
    for row in rows:
        if row.doubt:
            doubts.setdefault(_NUMBER.sub("", row.doubt), []).append(row)
    for first, *others in doubts.values():
        likewise = f"; likewise {', '.join(row.key for row in others)}" if others else ""
        yield text.wrap(f"? {first.key}: {first.doubt}{likewise}", width, "", "    ")


def _reasons(diagnoses: Mapping[str, str], width: int) -> Iterator[str]:
    """The figures of each measurement, below the words that explain them."""
    groups: dict[str, list[str]] = {}
    for key, diagnosis in diagnoses.items():
        figures, colon, words = diagnosis.rpartition(": ")
        groups.setdefault(words, []).append(f"{key}{colon}{figures}")
    for words, rows in groups.items():
        yield "\n".join([text.wrap(words, width), *(text.wrap(row, width, "  ", "      ") for row in rows)])
