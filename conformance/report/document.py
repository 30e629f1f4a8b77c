"""Reading `report.json`: a file that somebody else may have written or changed, so nothing in it is believed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import consistency, decode, layout
from .values import Case, Report

__all__ = [
    "SCHEMA",
    "Report",
    "ReportError",
    "cases",
    "content",
    "decoded",
    "examine",
    "examined",
    "load",
    "locate",
    "parse",
    "parsed",
    "read",
    "sha256",
]

SCHEMA = "amp-conformance-report/4"
FILE = "report.json"
PACKED = f"{FILE}.gz"
MAX_BYTES = 64 * 2**20

# Of the report of a run in progress: what stands before its records, a line each, and after them.
RECORDS_BEGIN = ',\n"cases": ['
RECORDS_END = '\n],\n"footer": null}\n'

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_KIND, _VERSION = SCHEMA.split("/")
_GZIP = b"\x1f\x8b"


class ReportError(ValueError):
    """A report that cannot be used; the message is one line that names the file and what is wrong."""


class MissingReport(ReportError):
    """There is no file to read: mostly a mistyped path, which must not look like an empty report."""


class TooLarge(ReportError):
    """The file is larger than any run writes; parsing it could take all the memory of the reader's machine."""


class NotJSON(ReportError):
    """The file is no JSON document: cut off by a full disk, or something else altogether."""


class WrongKind(ReportError):
    """The file is JSON and not a report of this suite, such as a JUnit converter's or a benchmark's."""


class NewerSchema(ReportError):
    """The report was written by a later suite; guessing at what changed could turn a failure into a pass."""


class OlderSchema(ReportError):
    """The report was written by an earlier suite, whose form this one does not read."""


class UnknownKeys(ReportError):
    """The report says something that no view would show, so a reader would sign for less than is written."""


class WrongTypes(ReportError):
    """A value is missing or not of its type; the views would show nonsense or break halfway."""


class Duplicate(ReportError):
    """Two records claim one id: joined to another run, one of them would hide the other."""


class UnknownContract(ReportError):
    """A case names a contract that the header does not have, so its meaning is unknown."""


class Disagreement(ReportError):
    """The report contradicts itself: it was changed after the run, or the suite counts wrongly."""


def read(path: str | Path) -> Report:
    """Read the report at `path`, or in the folder `path`; raises ReportError.

    A report without a footer is fine: it is of a run that did not end, and its overall verdict is INCOMPLETE.
    """
    report, problems = examine(path)
    if problems:
        raise Disagreement(f"{locate(path)}: {problems[0]}")
    return report


def examine(path: str | Path) -> tuple[Report, list[str]]:
    """Return the report at `path` and all that contradicts itself in it, a line each; raises ReportError."""
    file = locate(path)
    try:
        return examined(_content(file, "a report", MAX_BYTES))
    except ReportError as error:
        raise type(error)(f"{file}: {error}") from None


def examined(data: bytes) -> tuple[Report, list[str]]:
    """Return the report in the bytes `data` and all that contradicts itself in it, a line each; raises ReportError."""
    written = parsed(data)
    report = parse(written)
    problems = list(consistency.contradictions(report))
    if report.footer and report.footer.digest and report.footer.digest != consistency.digest(written):
        problems.append("the report is not the one that the run wrote: it was changed or damaged (its digest differs)")
    return report, problems


def locate(path: str | Path) -> Path:
    """Return the file that `path` names: itself, or the report in that folder, gzipped if it is there only so."""
    # Path.is_dir raises below a folder that is locked, and for a name that is too long.
    if not os.path.isdir(path):
        return Path(path)
    packed = not os.path.exists(Path(path, FILE)) and os.path.exists(Path(path, PACKED))
    return Path(path, PACKED if packed else FILE)


def sha256(file: Path) -> str:
    """Return the SHA-256 of the report in `file`, of its bytes before compression if it is gzipped; raises ReportError.

    A report therefore keeps its sum when it is compressed.
    """
    return hashlib.sha256(content(file)).hexdigest()


def content(file: Path) -> bytes:
    """Return the bytes of the report in `file`, decompressed if it is gzipped; raises ReportError."""
    try:
        return _content(file, "a report", MAX_BYTES)
    except ReportError as error:
        raise type(error)(f"{file}: {error}") from None


def parse(document: Any) -> Report:
    """Return the report in `document` (of json.loads); raises ReportError.

    The footer is held against the form only, not against the records: the run itself parses a report whose
    overall verdict it has yet to derive.
    """
    _check_kind(document)
    if "checks" in document and "cases" not in document:
        document = _told(layout.spelled_out, document)
    report: Report = decoded(Report, document)
    _check_ids(report)
    _check_ranges(report)
    return report


def cases(check: Any) -> tuple[Case, ...]:
    """Return the cases of one folded check (of json.loads); raises ReportError."""
    found: tuple[Case, ...] = decoded(tuple[Case, ...], _told(layout.spelled_out, {"checks": [check]})["cases"])
    return found


def decoded(hint: Any, document: Any) -> Any:
    """Return `document` (of json.loads) as the values that `hint` says; raises UnknownKeys and WrongTypes."""
    return _told(partial(decode.decode, hint), document)


def _told(decoder: decode.Decoder, document: Any) -> Any:
    try:
        return decoder(document)
    except decode.UnknownKey as error:
        raise UnknownKeys(str(error)) from None
    except decode.Mismatch as error:
        raise WrongTypes(str(error)) from None
    except RecursionError:
        raise WrongTypes("lists are nested too deeply") from None


def load(file: Path, what: str, at_most: int) -> Any:
    """Return the JSON in `file`, gzipped or not, which the messages call `what` and which has at most `at_most` bytes.

    Raises MissingReport, TooLarge and NotJSON.
    """
    return parsed(_content(file, what, at_most))


def parsed(data: bytes) -> Any:
    """Return the JSON in `data`; raises NotJSON, also for keys that come twice and numbers that are not finite."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise NotJSON("not a JSON document: not UTF-8") from None
    try:
        try:
            return _parsed(text)
        except ValueError:
            if (whole := _without_the_last_write(text)) is None:
                raise
            return _parsed(whole)
    except RecursionError:
        raise NotJSON("not a JSON document that can be read: nested too deeply") from None
    except ValueError as error:
        raise NotJSON(f"not a JSON document: {error}") from None


def _parsed(text: str) -> Any:
    return json.loads(text, parse_float=_finite, parse_constant=_refuse, object_pairs_hook=_unique)


def _without_the_last_write(text: str) -> str | None:
    """Return the records before the one whose write was cut off, as the report of a run that did not end.

    A kill or a loss of power can cut a write in the middle. None where the text is not of a run in progress.
    """
    begun, mark, records = text.partition(RECORDS_BEGIN)
    if not mark or not begun.startswith('{"schema":"' + _KIND) or "\n" in begun:
        return None
    lines = records.split("\n")[1:-1]
    whole = [line.rstrip(",") for line in lines if line.endswith("},")]
    return f"{begun}{mark}\n" + ",\n".join(whole) + RECORDS_END


def _content(file: Path, what: str, at_most: int) -> bytes:
    """Return the bytes of `file`, decompressed where they are gzip; more than `at_most` are never held in memory."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise MissingReport("not a regular file")
        if found.st_size > at_most:
            raise TooLarge(f"{found.st_size} bytes, and {what} has at most {at_most}")
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingReport("there is no such file") from None
    except OSError as error:
        raise MissingReport(f"cannot be read: {error.strerror or error}") from None
    return _unpacked(content, what, at_most) if content.startswith(_GZIP) else content


def _unpacked(packed: bytes, what: str, at_most: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(packed, at_most + 1)
    except zlib.error:
        raise NotJSON("not a JSON document: its gzip data are damaged") from None
    if len(content) > at_most:
        raise TooLarge(f"more than {at_most} bytes when decompressed, and {what} has at most so many")
    if not unpacker.eof:
        raise NotJSON("not a JSON document: its gzip data end early")
    if unpacker.unused_data:
        raise NotJSON("not a JSON document: something follows its gzip data")
    return content


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"the number {literal[:20]} is not finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return table


def _check_kind(document: Any) -> None:
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, str) and schema.startswith("amp-conformance-baseline/"):
        raise WrongKind("a baseline, which diff, html --against and --baseline read, and not a report")
    if not isinstance(schema, str) or not (found := re.fullmatch(rf"{_KIND}/(\d{{1,9}})", schema)):
        raise WrongKind(f'not a report of this suite: its "schema" is not {SCHEMA!r}')
    if int(found.group(1)) > int(_VERSION):
        raise NewerSchema(f"written by a newer suite ({schema}); this one reads {SCHEMA}: update the suite")
    if int(found.group(1)) < int(_VERSION):
        raise OlderSchema(f"written by an older suite ({schema}); this one reads {SCHEMA}: run it again")


def _check_ids(report: Report) -> None:
    _unique_ids("chapter", [chapter.name for chapter in report.header.chapters])
    _unique_ids("contract", [contract.id for contract in report.header.contracts])
    _unique_ids("case", [case.id for case in report.cases])
    chapters = {chapter.name for chapter in report.header.chapters}
    for contract in report.header.contracts:
        if contract.chapter not in chapters:
            raise UnknownContract(f"the contract {contract.id} is of no chapter of the report")
    for case in report.cases:
        if case.contract not in report.contracts:
            raise UnknownContract(f"the case {case.id} is of no contract of the report")


def _check_ranges(report: Report) -> None:
    footer = report.footer
    times = [report.header.started, *([footer.finished] if footer else [])]
    days = [waiver.expires for waiver in footer.waivers] if footer else []
    counts: list[float] = [case.duration_s for case in report.cases]
    if footer:
        counts += [footer.duration_s, *footer.totals.values(), *(row.cases for row in footer.contracts.values())]
        counts += [waiver.matched for waiver in footer.waivers]
    for pattern, texts in ((_TIME, times), (_DAY, days)):
        if strange := next((words for words in texts if not pattern.match(words)), None):
            raise WrongTypes(f"{strange!r} is no ISO 8601 date")
    if min(counts, default=0) < 0:
        raise WrongTypes(f"{min(counts)} is no count and no duration: it is negative")


def _unique_ids(what: str, ids: list[str]) -> None:
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            raise Duplicate(f"the {what} {id!r} is there twice")
        seen.add(id)
