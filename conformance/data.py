"""Where the suite's data lies: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parent


def fixture(name: str) -> Path:
    """Return the path of the data file `name` (relative to `fixtures/`); raises FileNotFoundError."""
    for folder in (_PACKAGE.parent / "fixtures", _PACKAGE / "fixtures"):
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(f"the suite's data file fixtures/{name} is missing from this installation")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse the TOML file at `path`; raises OSError and tomllib.TOMLDecodeError (a ValueError)."""
    with path.open("rb") as stream:
        return tomllib.load(stream)
