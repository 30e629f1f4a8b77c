"""Where the suite's data lies, beside the package or inside it, and which torch a row of it is about."""

from __future__ import annotations

import errno
import os
import re
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
    """Parse the TOML file at `path`; raises OSError and tomllib.TOMLDecodeError (a ValueError).

    A pipe or a device, which may never end, is refused as an OSError.
    """
    if os.path.exists(path) and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as stream:
        return tomllib.loads(stream.read().decode("utf-8-sig"))


def read_users_toml(path: Path, kind: type[Exception]) -> dict[str, Any]:
    """Parse the TOML file at `path` that a user named; raises `kind` in one line where that cannot be done."""
    try:
        return read_toml(path)
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise kind(f"{path}: not TOML: {error}") from None
    except RecursionError:
        raise kind(f"{path}: not TOML that can be read: nested too deeply") from None


def in_force(torch_version: str, since: str | None = None, until: str | None = None) -> bool:
    """Whether a row that holds from torch `since` on, and until before torch `until`, holds for `torch_version`.

    Releases are compared, as "2.13": a nightly, a release candidate or a vendor's build of 2.13 counts as 2.13.
    """
    release = _release(torch_version)
    return (since is None or _release(since) <= release) and (until is None or release < _release(until))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
