"""Where the suite's data lies, beside the package or inside it, and which torch a row of it is about."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 2**20  # of a TOML file that a user named

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = (".py", ".toml", ".json", ".csv", ".ini")


def fixture(name: str) -> Path:
    """Return the path of the data file `name` (relative to `fixtures/`); raises FileNotFoundError."""
    for folder in (_PACKAGE.parent / "fixtures", _PACKAGE / "fixtures"):
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(f"the suite's data file fixtures/{name} is missing from this installation")


@cache
def digest() -> str:
    """Return the SHA-256 of the suite's own files: its code, its catalogue and its data, wherever it is installed."""
    files = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*") if path.suffix in _SUFFIXES}
    files = {name: path for name, path in files.items() if not name.startswith("fixtures/")}
    data = fixture("waivers.toml").parent
    files.update({f"fixtures/{path.name}": path for path in data.iterdir() if path.suffix in _SUFFIXES})
    return digest_of(files.items())


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return the SHA-256 of the `files` by name, each with its own SHA-256; line ends count as one character."""
    rows = [
        f"{hashlib.sha256(path.read_bytes().replace(bytes((13, 10)), bytes((10,)))).hexdigest()}  {name}\n"
        for name, path in sorted(files)
    ]
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def fixture_folder(name: str) -> Path | None:
    """Return the folder `name` of data files in `fixtures/`, None where this installation lacks it."""
    folders = (_PACKAGE.parent / "fixtures" / name, _PACKAGE / "fixtures" / name)
    return next((folder for folder in folders if folder.is_dir()), None)


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
        if path.is_file() and path.stat().st_size > _MAX_BYTES:
            raise kind(f"{path}: {path.stat().st_size} bytes, and a file of settings has at most {_MAX_BYTES}")
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
