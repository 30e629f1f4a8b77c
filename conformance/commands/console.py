"""Shared by the commands: exit statuses, errors of one line, output to any terminal."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ..report import document

OK, DIFFERENT, INCOMPLETE, USAGE = 0, 1, 2, 4


class UsageError(ValueError):
    """The command cannot be carried out as given; the message is one line."""


def write(path: Path, page: str) -> int:
    """Write `page` to the file that --output names; raises UsageError."""
    return write_bytes(path, page.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> int:
    """Write `content` to the file that --output names; raises UsageError."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror or error}") from None
    return OK


def show(words: str) -> None:
    """Print to any standard output, also to one that cannot show every character."""
    encoding = sys.stdout.encoding or "utf-8"
    print(words.encode(encoding, errors="replace").decode(encoding))


def deliver(content: str, output: str | None, inputs: list[str | None]) -> int:
    """Write `content` to the file `output`, or print it; raises UsageError if that is one of the `inputs`."""
    if output is None:
        show(content.rstrip("\n"))
        return OK
    for given in inputs:
        file = None if given is None else document.locate(given)
        if file is not None and os.path.exists(output) and Path(output).samefile(file):
            raise UsageError(f"--output {output} is the report itself; name another file")
    return write(Path(output), content)


def width() -> int:
    """Return how wide a text may be: the terminal's width, within 80 and 100."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 100)


def colour() -> bool:
    """Whether standard output shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
