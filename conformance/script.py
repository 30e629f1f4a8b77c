"""The installed command `amp-conformance`: a command over reports where one is named, else a run of the suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SUITE = Path(__file__).resolve().parent


def main() -> int:
    """Carry out the command line; returns the exit status."""
    words = sys.argv[1:]
    from . import __main__ as commands

    if words and words[0] in (*commands.NAMES, "--version", "-h", "--help"):
        return commands.main(words)
    return _run(words)


def _run(words: list[str]) -> int:
    """Run the suite with neither the settings nor the conftest.py of the project in the current folder."""
    import pytest

    # The folder of a checkout that is installed for development is named otherwise than the package.
    if _SUITE.name != __package__:
        sys.path.insert(0, str(_SUITE.parent))
    alone = ["-c", str(_SUITE / "harness" / "installed.ini"), "--rootdir", os.getcwd(), "--noconftest"]
    plugin = ["-p", f"{_SUITE.name}.harness.plugin"]
    return int(pytest.main([*alone, *plugin, "--pyargs", "amp_conformance", *words]))
