"""Run a command of the suite in this process."""

from __future__ import annotations

from conformance.__main__ import main


def exit_status(*words: str) -> int:
    """Return the exit status of `python -m conformance` with these words."""
    try:
        return main(words)
    except SystemExit as stop:
        return int(stop.code or 0)
