"""Shared by the commands: exit statuses, errors of one line, output to any terminal."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

OK, DIFFERENT, USAGE = 0, 1, 4


class UsageError(ValueError):
    """The command cannot be carried out as given; the message is one line."""


def write(path: Path, page: str) -> int:
    """Write `page` to the file that --output names; raises UsageError."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror or error}") from None
    return OK


def show(words: str) -> None:
    """Print to any standard output, also to one that cannot show every character."""
    encoding = sys.stdout.encoding or "utf-8"
    print(words.encode(encoding, errors="replace").decode(encoding))


def width() -> int:
    """Return how wide a text may be: the terminal's width, within 80 and 120."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def colour() -> bool:
    """Whether standard output shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
