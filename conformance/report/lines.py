"""A report read by its lines: what is word for word as in a report that was read before is not parsed again.

A thousand reports of one kind of machine differ in durations and in a few measured values. A finished report has each
case in a line of its own (layout.written), so a case whose line is known but for its duration is known to be sound.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from . import consistency, document, fingerprint, layout, rollup, speed, text
from .document import Disagreement
from .values import Case, Footer, Header, Report
from .verdicts import Overall, Verdict

_HEADER, _CHECKS, _FOOTER = '"header":', '"checks":[', '\n],\n"footer":'
_CASES = ',"cases":['
_CASE = re.compile(r'^\[((?:"(?:[^"\\]|\\.)*"|null),"(?:[^"\\]|\\.)*"),"([A-Z]+)",([0-9.eE+-]+),(.*),\n', re.MULTILINE)
_VERDICTS = {verdict.value: verdict for verdict in Verdict}
_SPEEDS = ("AMP ms", "baseline ms")
_MOST = 4096  # characters of the first line
_KEPT = 4  # lines of a case that are kept: its measured values may be others in each report

_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class _OtherLayout(Exception):
    """The file is a report in another layout, such as that of a run that did not end; it is read as a whole."""


@dataclass(frozen=True)
class Line:
    """A case but for its duration: `case` where it did not pass, what was measured by name, and times by name."""

    rest: str
    case: Case | None
    values: Mapping[str, Any]
    times: Mapping[str, float]


@dataclass
class Read:
    """A report that was read by its lines: its cases by check and by id and target, and those that did not pass."""

    header: Header
    footer: Footer | None
    cases: dict[str, dict[str, Line]]
    reduced: Report
    count: int

    @cached_property
    def overall(self) -> Overall:
        """What the run comes to."""
        return rollup.overall(self.reduced)


@dataclass
class Reader:
    """Reads reports, and remembers the lines of those that it has read."""

    _checks: dict[str, _Check] = field(default_factory=dict)
    _context: object = None
    _contracts: tuple[Any, list[Any]] = (None, [])  # as parsed, and as values

    def read(self, file: Path) -> Read:
        """Read the report in `file` and check it as `verify` does; raises document.ReportError."""
        data = document.content(file)
        try:
            try:
                return self._lines(data, sealed=True)
            except _OtherLayout:
                report, problems = document.examined(data)
                if problems:
                    raise Disagreement(problems[0]) from None
                return self._lines("".join(layout.written(layout.folded(report))).encode(), sealed=False)
        except document.ReportError as error:
            raise type(error)(f"{file}: {error}") from None

    def _lines(self, data: bytes, *, sealed: bool) -> Read:
        head, header_words, body, footer_words = _parts(data)
        whole = {"schema": head, "header": header_words, "checks": [], "footer": footer_words}
        skeleton = document.parse({**whole, "header": self._shortened(header_words)})
        context = (
            skeleton.header.contracts,
            tuple(target.name for target in skeleton.header.targets),
            skeleton.header.options.no_waivers,
        )
        if context != self._context:
            self._checks, self._context = {}, context
        self._contracts = header_words["contracts"], list(skeleton.header.contracts)
        walk = _Walk(self, skeleton)
        written = [walk.block(block) for block in body]
        found = walk.finished()
        if sealed:
            _check_digest(whole, written)
            _check_footer(found, walk.totals)
        return found

    def header(self, file: Path) -> Header:
        """Return the header of the report in `file`, of which no more is read; raises document.ReportError."""
        try:
            with (gzip.open if _is_gzip(file) else open)(file, "rb") as stream:
                stream.readline(_MOST)
                second = stream.readline(document.MAX_BYTES)
            if not (second.startswith(_HEADER.encode()) and second.endswith(b",\n")):
                return document.read(file).header
            words = document.parsed(second[len(_HEADER) : -2])
        except (OSError, EOFError, zlib.error) as error:
            raise document.MissingReport(f"{file}: cannot be read: {text.line(str(error))}") from None
        except document.NotJSON as error:
            raise document.NotJSON(f"{file}: {error}") from None
        try:
            header: Header = document.decoded(Header, self._shortened(words))
        except document.ReportError as error:
            raise type(error)(f"{file}: {error}") from None
        self._contracts = words["contracts"], list(header.contracts)
        return header

    def _shortened(self, header: Any) -> Any:
        """Return a header of JSON with the contracts as values, where they are those of the report before."""
        if isinstance(header, dict) and header.get("contracts") == self._contracts[0]:
            return {**header, "contracts": self._contracts[1]}
        return header

    def check(self, head: str) -> _Check:
        """Return the check that begins with the line `head`; raises document.NotJSON."""
        found = self._checks.get(head)
        if found is None:
            said = document.parsed(f"{{{head[: -len(_CASES)]}}}".encode())
            contract = str(said.get("contract"))
            found = self._checks[head] = _Check(contract, head.partition(',"rows":')[0], _sorted(said)[1:])
        return found


@dataclass(frozen=True)
class _Check:
    """The first line of a check: its contract, what names the check, the line sorted; and its cases so far, by line."""

    contract: str
    name: str
    rest: str
    lines: dict[str, Line] = field(default_factory=dict)


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _parts(data: bytes) -> tuple[Any, Any, list[str], Any]:
    """Return the schema, the header, the blocks of the checks and the footer of a report in the layout of a run.

    A line end is written in no text of JSON, so that the layout can be found without parsing.
    """
    try:
        whole = data.decode("ascii")
    except UnicodeDecodeError:
        raise _OtherLayout from None
    first, _, rest = whole.partition("\n")
    second, _, rest = rest.partition("\n")
    third, _, rest = rest.partition("\n")
    body, end, last = f"\n{rest}".rpartition(_FOOTER)
    body = body[1:]
    if not (
        first.endswith(",")
        and second.startswith(_HEADER)
        and second.endswith(",")
        and third == _CHECKS
        and end
        and last[-2:] == "}\n"
    ):
        raise _OtherLayout
    schema = document.parsed(f"{first[:-1]}}}".encode()).get("schema")
    header = document.parsed(second[len(_HEADER) : -1].encode())
    if body and not (body.startswith("{") and body.endswith("}")):
        raise _OtherLayout
    blocks = body[1:-1].split("},\n{") if body else []
    return schema, header, blocks, document.parsed(last[:-2].encode())


class _Walk:
    """One report while its lines are read."""

    def __init__(self, reader: Reader, skeleton: Report) -> None:
        self._reader, self._skeleton = reader, skeleton
        self._targets = {target.name for target in skeleton.header.targets} | {"host"}
        self._cases: dict[str, dict[str, Line]] = {}
        self._reduced: list[Case] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def block(self, block: str) -> str:
        """Read a check; returns its text in the form of which digests are made."""
        head, _, body = block.partition("\n")
        if not head.endswith(_CASES) or not body.endswith("]"):
            raise _OtherLayout
        check = self._reader.check(head)
        if check.contract not in self._skeleton.contracts:
            raise document.UnknownContract(f"a check is of no contract of the report: {check.contract[:60]!r}")
        body = body[:-1]
        rows = _CASE.findall(f"{body},\n")
        if len(rows) != body.count("\n") + 1:
            raise _OtherLayout
        found = self._cases.setdefault(check.name, {})
        before, known, as_written = len(found), check.lines, True
        for place, verdict, duration, rest in rows:
            key = f"{place}{verdict}{rest}"
            one = known.get(key)
            if one is None:
                one = _parsed(self._skeleton, head, f'[{place},"{verdict}",{duration},{rest}', self._targets)
                if len(known) < _KEPT * len(rows) + _KEPT:
                    known[key] = one
            found[place] = one
            if one.case is not None:
                self._reduced.append(one.case)
            if one.rest != rest:
                as_written = False
        if len(found) != before + len(rows):
            raise document.Duplicate(f"two cases of a check of {check.contract} have one id")
        self._counts.update((check.contract, row[1]) for row in rows)
        if not as_written:
            body = ",\n".join(f'[{row[0]},"{row[1]}",{row[2]},{found[row[0]].rest}' for row in rows)
        return f'{{"cases":[{body}],{check.rest}'.replace("\n", "")

    def finished(self) -> Read:
        """Return what was read; cases that passed stand for one another."""
        passed = [_passed(contract) for contract, verdict in self._counts if verdict == Verdict.PASS.value]
        report = self._skeleton
        reduced = Report(report.schema, report.header, (*self._reduced, *passed), report.footer)
        return Read(report.header, report.footer, self._cases, reduced, sum(self._counts.values()))

    @property
    def totals(self) -> dict[tuple[str, Verdict], int]:
        """How many cases of each contract came to each verdict."""
        return {(contract, _VERDICTS[verdict]): count for (contract, verdict), count in self._counts.items()}


def _passed(contract: str) -> Case:
    return Case(contract, contract, None, "host", {}, Verdict.PASS, "", None, (), None, None, 0.0)


def _parsed(skeleton: Report, head: str, line: str, targets: set[str]) -> Line:
    words = document.parsed(f"{{{head}{line}]}}".encode())
    (case,) = document.cases(words)
    if problem := next(consistency.of_case(skeleton, case, targets), None):
        raise Disagreement(problem)
    rest = ",".join(_sorted(part) for part in words["cases"][0][4:]) + "]"
    times = {}
    values: dict[str, Any] = {}
    for evidence in case.evidence:
        if evidence.unit == speed.UNIT and isinstance(evidence.measured, tuple):
            figures = dict(pair for pair in evidence.measured if isinstance(pair, tuple) and len(pair) == 2)
            times.update(
                {f"{evidence.name}, {name}": float(figures[name]) for name in _SPEEDS if _is_time(figures.get(name))}
            )
        elif evidence.unit == fingerprint.UNIT and isinstance(evidence.measured, tuple):
            pairs = (pair for pair in evidence.measured if isinstance(pair, tuple) and len(pair) == 2)
            values.update({f"{evidence.name}, {row}": value for row, value in pairs})
        else:
            values[evidence.name] = evidence.measured
    return Line(rest, None if case.verdict is Verdict.PASS else case, values, times)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _check_digest(whole: Mapping[str, Any], checks: list[str]) -> None:
    """Compare the digest as consistency.digest does, of texts that are in its form already."""
    footer = whole["footer"]
    said = footer.get("digest") if isinstance(footer, dict) else None
    if said is None:
        return
    rest = {key: value for key, value in footer.items() if key != "digest"}
    parts = ('{"checks":[', ",".join(checks), '],"footer":', _sorted(rest), ',"header":', _sorted(whole["header"]))
    found = hashlib.sha256("".join((*parts, ',"schema":', _sorted(whole["schema"]), "}")).encode()).hexdigest()
    if found != said:
        raise Disagreement(
            "the report is not the one that the run wrote: it was changed or damaged (its digest differs)"
        )


def _check_footer(found: Read, totals: Mapping[tuple[str, Verdict], int]) -> None:
    """Compare counts and verdicts of the footer with the cases, as consistency.contradictions does."""
    footer = found.footer
    if footer is None:
        return
    counted: Counter[Verdict] = Counter()
    cases: Counter[str] = Counter()
    for (contract, verdict), count in totals.items():
        counted[verdict] += count
        cases[contract] += count
    if {verdict: count for verdict, count in footer.totals.items() if count} != dict(counted):
        raise Disagreement("the footer counts other cases than there are")
    for id, derived in rollup.verdicts(found.reduced).items():
        said = footer.contracts.get(id)
        if said is None or said.verdict is not derived or said.cases != cases[id]:
            raise Disagreement(f"the footer says of {id} what its cases do not come to")
    if footer.overall is not found.overall:
        raise Disagreement(f"the footer says {footer.overall.value}, the records come to {found.overall.value}")


def times(found: Read) -> Iterator[tuple[str, float]]:
    """Yield each time that a report measured, by name and target."""
    for cases in found.cases.values():
        for place, line in cases.items():
            if line.times:
                target = json.loads(f"[{place}]")[1]
                yield from ((f"{name}, on {target}", value) for name, value in line.times.items())
