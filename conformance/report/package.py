"""The package of a run: its report, the views of it and their SHA-256 sums in one archive that has one form only.

The archive is a ZIP file of stored members in a fixed order with fixed times and modes. The same report gives the same
bytes everywhere, so a reader makes the archive again from what it holds and compares: nothing can be added to it,
hidden in it or changed in its structure.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import checklist, document, page, terminal
from .encode import encode
from .rollup import overall
from .values import Count, Digest, Report, Suite, Time
from .verdicts import Overall

KIND = "amp-conformance-package/1"
FOLDER = "amp-conformance/"
MAX_BYTES = 256 * 2**20

REPORT, SUMS, ABOUT, WAIVERS = "report.json", "SHA256SUMS", "package.json", "waivers.json"
_WIDTH = 100

VIEWS: Mapping[str, Callable[[Report, str], str]] = {
    "checklist.html": lambda report, sha256: checklist.render(report, digest=sha256, form="html", with_annex=True),
    "checklist.md": lambda report, sha256: checklist.render(report, digest=sha256, with_annex=True),
    "report.html": lambda report, sha256: page.render(report, digest=sha256),
    "summary.txt": lambda report, sha256: terminal.render(report, short=False, width=_WIDTH, report_path=REPORT) + "\n",
}
"""The members that are made from the report (and the SHA-256 of its file) and can be made again."""

NAMES = (SUMS, ABOUT, REPORT, WAIVERS, *VIEWS)
"""The members of a package, in their order."""

_SIGNATURE = b"PK"
_END = struct.Struct("<4s4H2LH")  # the end of a ZIP file: signature, disks, entries, size and place of the directory
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_UNIX = 3
_MOST_DIRECTORY = 4096
# zipfile raises all of these for archives that it did not write.
_DAMAGE = (zipfile.BadZipFile, struct.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)


class PackageError(ValueError):
    """A package that does not verify; the message is one line that says what is wrong with it."""


@dataclass(frozen=True)
class About:
    """What `package.json` says of a package: the suite that made it, and the report that it is of."""

    package: str
    made_by: Suite
    judged_by: Suite
    report_sha256: Digest
    started: Time
    overall: Overall
    contracts: Count
    cases: Count


def is_package(path: Path) -> bool:
    """Whether the regular file at `path` begins as a package does; False where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


def content(path: Path) -> bytes:
    """Return the bytes of the package at `path`; raises PackageError where they cannot be read or are too many."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise PackageError("not a regular file")
        if found.st_size > MAX_BYTES:
            raise PackageError(f"{found.st_size} bytes, and a package has at most {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise PackageError(f"cannot be read: {error.strerror or error}") from None


def members(data: bytes, report: Report, made_by: Suite) -> dict[str, bytes]:
    """Return the members of the package of `report`, whose file holds `data`, as the suite `made_by` makes them."""
    sha256 = hashlib.sha256(data).hexdigest()
    suite = report.header.suite
    counts = len(report.contracts), len(report.cases)
    about = About(KIND, made_by, suite, sha256, report.header.started, overall(report), *counts)
    found = {
        ABOUT: _json(encode(about)),
        REPORT: data,
        WAIVERS: _json(encode(report.footer.waivers if report.footer else ())),
        **{name: render(report, sha256).encode() for name, render in VIEWS.items()},
    }
    return {SUMS: sums(found), **found}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def sums(found: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 of each member but the sums themselves, in the form that `sha256sum -c` reads."""
    rows = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in found.items() if name != SUMS)
    return "".join(rows).encode("ascii")


def pack(found: Mapping[str, bytes]) -> bytes:
    """Return the archive of the members `found`, the same bytes for the same members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name in NAMES:
            info = zipfile.ZipInfo(FOLDER + name, _TIME)
            info.create_system, info.external_attr = _UNIX, _MODE
            archive.writestr(info, found[name])
    return stream.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the members of the archive `data`, without writing a file; raises PackageError.

    Anything but the archive that `pack` makes of these members is refused: other members, a second copy of one, links,
    compression, other names, times or modes, bytes before, between or after.
    """
    _check_directory(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            _check_members(infos)
            found = {info.filename.removeprefix(FOLDER): archive.read(info) for info in infos}
    except PackageError:
        raise
    except _DAMAGE as error:
        raise PackageError(f"damaged: {error}") from None
    if sums(found) != found[SUMS]:
        raise PackageError(f"{_differing(found)} is not what {SUMS} says")
    if pack(found) != data:
        raise PackageError("its form is not that of a package: it was changed after it was made")
    return found


def _check_directory(data: bytes) -> None:
    """Refuse an archive whose directory is not that of a few members, before anything is read from it."""
    if len(data) < _END.size:
        raise PackageError("truncated")
    signature, *_, entries, size, _, comment = _END.unpack(data[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise PackageError("truncated, or something was appended")
    if entries != len(NAMES) or size > _MOST_DIRECTORY:
        raise PackageError(f"it has {entries} members, and a package has {len(NAMES)}: {', '.join(NAMES)}")


def _check_members(infos: list[zipfile.ZipInfo]) -> None:
    for info, name in zip(infos, NAMES, strict=True):
        if info.filename != FOLDER + name:
            raise PackageError(f"it has a member {info.filename[:80]!r} in the place of {FOLDER + name!r}")
        if info.external_attr != _MODE:
            raise PackageError(f"{name} is no plain file")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits or info.file_size != info.compress_size:
            raise PackageError(f"{name} is compressed or encrypted, and the members of a package are stored")


def _differing(found: Mapping[str, bytes]) -> str:
    """Name the member whose sum is not in the list of sums."""
    said = found[SUMS].split(b"\n")
    for row in sums(found).splitlines():
        if row not in said:
            return row.decode().split("  ", 1)[1]
    return SUMS


def about(found: Mapping[str, bytes]) -> About:
    """Return what a package says of itself; raises PackageError."""
    try:
        said: About = document.decoded(About, document.parsed(found[ABOUT]))
    except document.ReportError as error:
        raise PackageError(f"{ABOUT}: {error}") from None
    if said.package != KIND:
        raise PackageError(f"{ABOUT}: its kind is {said.package[:60]!r}, and this suite reads {KIND!r}")
    return said


def differing(found: Mapping[str, bytes], report: Report) -> list[str]:
    """Return the members that are not what this suite makes of the report in the package; raises PackageError."""
    again = members(found[REPORT], report, about(found).made_by)
    return [name for name in NAMES if name != SUMS and found[name] != again[name]]
