"""The writer of report.json: a document that is whole JSON after every record, so a killed run can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report import layout
from ..report.document import SCHEMA
from ..report.encode import encode
from ..report.values import Header

_TAIL = b'\n],\n"footer": null}\n'


class ReportInUse(OSError):
    """Another run is writing its report into the same folder."""


class Recorder:
    """Writes the header at once and each case as it ends; at last the folded report takes the place of all that."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "report.json"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(self._file)
        os.ftruncate(self._file, 0)
        head = {"schema": SCHEMA, "header": encode(header)}
        self._end = 0
        self._first = True
        self._write(_encoded(head).removesuffix(b"}") + b',\n"cases": [')

    def add(self, record: dict[str, Any]) -> None:
        """Append one case."""
        comma = b"" if self._first else b","
        self._first = False
        self._write(comma + b"\n" + _encoded(record))

    def finish(self, report: Mapping[str, Any]) -> None:
        """Put the whole `report`, folded, in the place of what was written so far."""
        whole = self.path.with_suffix(".whole")
        try:
            whole.write_text("".join(layout.written(report)), encoding="ascii")
            os.replace(whole, self.path)
        except OSError:
            whole.unlink(missing_ok=True)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Leave the report as it stands."""
        os.close(self._file)

    def _write(self, chunk: bytes) -> None:
        # One call writes the chunk and the closing brackets over the old ones: a reader sees either state.
        os.pwrite(self._file, chunk + _TAIL, self._end)
        self._end += len(chunk)


_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encoded(value: Any) -> bytes:
    return _JSON.encode(value).encode("ascii")


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
