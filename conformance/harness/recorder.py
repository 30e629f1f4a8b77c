"""The writer of report.json: a document that is whole JSON after every record, so a killed run can be read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report import document, layout
from ..report.document import SCHEMA
from ..report.encode import encode
from ..report.values import Header

_TAIL = document.RECORDS_END.encode("ascii")


PREVIOUS = "report.previous.json"
"""The report of the run before, where a folder is used again."""


class ReportInUse(OSError):
    """Another run is writing its report into the same folder."""


class Recorder:
    """Writes the header at once and each case as it ends; at last the folded report takes the place of all that."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "report.json"
        self.previous = _set_aside(self.path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(self._file)
        os.ftruncate(self._file, 0)
        head = {"schema": SCHEMA, "header": encode(header)}
        self._end = 0
        self.records = 0
        try:
            self._write(_encoded(head).removesuffix(b"}") + document.RECORDS_BEGIN.encode("ascii"))
        except OSError:
            self.close()
            self.path.unlink(missing_ok=True)
            if self.previous is not None:
                os.replace(self.previous, self.path)
            raise

    def add(self, record: dict[str, Any]) -> None:
        """Append one case."""
        self._write(b"," * bool(self.records) + b"\n" + _encoded(record))
        self.records += 1

    def finish(self, report: Mapping[str, Any]) -> None:
        """Put the whole `report`, folded, in the place of what was written so far."""
        whole = self.path.with_suffix(".whole")
        try:
            whole.write_text("".join(layout.written(report)), encoding="ascii")
            os.replace(whole, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                whole.unlink(missing_ok=True)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Leave the report as it stands."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, chunk: bytes) -> None:
        # One call writes the chunk and the closing brackets over the old ones: a reader sees either state.
        try:
            written = os.pwrite(self._file, chunk + _TAIL, self._end)
            if written < len(chunk) + len(_TAIL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # A full disk takes a part of the chunk; the old brackets need no new block.
            if self._end:
                os.pwrite(self._file, _TAIL, self._end)
                os.ftruncate(self._file, self._end + len(_TAIL))
            raise
        self._end += len(chunk)


_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encoded(value: Any) -> bytes:
    return _JSON.encode(value).encode("ascii")


def _set_aside(path: Path) -> Path | None:
    """Rename the report of an earlier run and return its new path; None where there is none, or a run writes it."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    file = os.open(path, os.O_RDWR)
    _lock(file)
    os.close(file)
    previous = path.with_name(PREVIOUS)
    os.replace(path, previous)
    return previous


def _lock(file: int) -> None:
    try:
        import fcntl
    except ImportError:  # no advisory locks on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ReportInUse("another run is writing its report there") from None
