"""The writer of report.json: a document that is whole JSON after every record, so a killed run can be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SCHEMA = "amp-conformance-report/1"
_TAIL = b'\n],\n"footer": null}\n'


class ReportInUse(OSError):
    """Another run is writing its report into the same folder."""


class Recorder:
    """Writes the header at once, each case as it ends, and the footer last."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "report.json"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(self._file)
        os.ftruncate(self._file, 0)
        head = {"schema": SCHEMA, "header": header}
        start = json.dumps(head, allow_nan=False, indent=1).rstrip().removesuffix("}").rstrip().encode()
        self._end = 0
        self._first = True
        self._write(start + b',\n"cases": [')

    def add(self, record: dict[str, Any]) -> None:
        """Append one case."""
        comma = b"" if self._first else b","
        self._first = False
        self._write(comma + b"\n" + json.dumps(record, allow_nan=False).encode())

    def finish(self, footer: dict[str, Any]) -> None:
        """Write the footer: the report is complete."""
        closing = b'\n],\n"footer": ' + json.dumps(footer, allow_nan=False, indent=1).encode() + b"}\n"
        os.pwrite(self._file, closing, self._end)
        self.close()

    def close(self) -> None:
        """Leave the report as it stands."""
        os.close(self._file)

    def _write(self, chunk: bytes) -> None:
        # One call writes the chunk and the closing brackets over the old ones: a reader sees either state.
        os.pwrite(self._file, chunk + _TAIL, self._end)
        self._end += len(chunk)


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
