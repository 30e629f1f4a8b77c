"""A package is the same bytes for the same report, and any other bytes are refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.report import package, scale_history
from tests import reports
from tests.paths import ROOT
from tests.report.packages import SUITE, members, sealed, summed

MEMBERS = members(sealed())
ARCHIVE = package.pack(MEMBERS)


def _refused(data: bytes) -> str:
    with pytest.raises(package.PackageError) as caught:
        package.unpack(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _zipped(
    found: dict[str, bytes],
    *,
    names: dict[str, str] | None = None,
    change: Callable[[zipfile.ZipInfo], None] = lambda info: None,
    comment: bytes = b"",
) -> bytes:
    """Return the members in a ZIP file that is like a package, but for what is changed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in found.items():
            info = zipfile.ZipInfo((names or {}).get(name, package.FOLDER + name), (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o100644 << 16
            change(info)
            archive.writestr(info, data)
        archive.comment = comment
    return stream.getvalue()


def test_package_is_the_same_bytes_each_time() -> None:
    assert package.pack(members(sealed())) == ARCHIVE
    assert _zipped(MEMBERS) == ARCHIVE


def test_views_do_not_depend_on_the_order_of_hashes(tmp_path: Path) -> None:
    """Make every view in processes with different hash seeds, of a report with several loss-scale histories."""
    (tmp_path / "report.json").write_text(json.dumps(_with_histories(5)), encoding="utf-8")
    program = (
        "import sys, hashlib\nfrom conformance.report import document, package\n"
        "report = document.read(sys.argv[1])\n"
        "print({name: hashlib.sha256(view(report, '0').encode()).hexdigest() for name, view in package.VIEWS.items()})"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip

    assert len(shown) == 1


def _with_histories(number: int) -> Any:
    whole = reports.raw("conformant")
    fact = {"name": "loss scale", "relation": None, "bound": None, "unit": scale_history.UNIT, "holds": True}
    for place, case in enumerate(whole["cases"][:number]):
        case["evidence"].append({**fact, "measured": [65536.0, 2.0 ** (15 - place), 2.0 ** (16 - place)]})
    whole["footer"] = None
    return whole


def test_the_documentation_lists_the_members() -> None:
    page = (ROOT / "docs" / "acceptance.md").read_text(encoding="utf-8")
    table = page.partition("## What is in a package")[2].partition("\n\nA ZIP file")[0]
    named = re.findall(r"`([\w.]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("|")))

    assert tuple(named) == package.NAMES
    assert f"the package has {len(package.NAMES)} members" in page


def test_members_come_back() -> None:
    assert package.unpack(ARCHIVE) == MEMBERS
    assert list(MEMBERS) == list(package.NAMES)


def test_other_tools_read_a_package(tmp_path: Path) -> None:
    """A buyer without the suite unpacks it and checks the sums."""
    with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path)

    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", package.SUMS], cwd=tmp_path / package.FOLDER, capture_output=True, check=False
    )

    assert checked.returncode == 0, checked.stderr


def test_package_names_its_report_and_its_suite() -> None:
    about = package.about(MEMBERS)

    assert about.made_by == SUITE
    assert about.judged_by.commit
    assert about.report_sha256 == hashlib.sha256(MEMBERS[package.REPORT]).hexdigest()
    assert about.report_sha256 in MEMBERS["checklist.md"].decode()


def test_every_changed_byte_is_refused() -> None:
    """Of the names, the directory and its end every byte; of the members a sample."""
    start = ARCHIVE.index(b"PK\1\2")
    places = {*range(200), *range(start, len(ARCHIVE)), *random.Random(0).sample(range(start), 1500)}
    for name in package.NAMES:
        at = ARCHIVE.index((package.FOLDER + name).encode())
        places |= set(range(at - 30, at + len(name) + 30))

    for place in sorted(places):
        changed = bytearray(ARCHIVE)
        changed[place] ^= 1 << (place % 8)
        _refused(bytes(changed))


@pytest.mark.parametrize("left", [0, 1, 21, 22, 100, len(ARCHIVE) // 2, len(ARCHIVE) - 22, len(ARCHIVE) - 1])
def test_truncated_is_refused(left: int) -> None:
    _refused(ARCHIVE[:left])


@pytest.mark.parametrize("more", [b"\0", b"PK", ARCHIVE], ids=["a byte", "two bytes", "another package"])
def test_something_before_or_after_is_refused(more: bytes) -> None:
    assert _refused(ARCHIVE + more) != ""
    assert _refused(more + ARCHIVE) != ""


def test_bytes_between_members_are_refused() -> None:
    """ZIP files may have gaps that no tool shows: the directory is moved behind one."""
    start = ARCHIVE.index(b"PK\1\2")
    end = ARCHIVE[-6:-2]
    moved = struct.pack("<L", start + 5)
    gap = ARCHIVE[:start] + b"hello" + ARCHIVE[start:].replace(end, moved)

    assert "form" in _refused(gap)


@pytest.mark.parametrize("name", package.NAMES)
def test_missing_member_is_refused(name: str) -> None:
    left = {other: data for other, data in MEMBERS.items() if other != name}

    assert f"it has {len(left)} members" in _refused(_zipped(left))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "notes.txt", "amp-conformance/../x", "C:\\x"])
def test_extra_member_is_refused(name: str) -> None:
    assert "members" in _refused(_zipped({**MEMBERS, "extra": b"x"}, names={"extra": name}))


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "amp-conformance/../report.json",
        "amp-conformance\\report.json",
        "report.json",
    ],
)
def test_other_name_is_refused(name: str) -> None:
    assert "in the place of 'amp-conformance/report.json'" in _refused(_zipped(MEMBERS, names={"report.json": name}))


def test_second_copy_is_refused() -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        copies = _zipped(MEMBERS, names={package.WAIVERS: package.FOLDER + package.REPORT})

    assert "in the place of" in _refused(copies)


def test_other_order_is_refused() -> None:
    assert "in the place of" in _refused(_zipped(dict(reversed(MEMBERS.items()))))


@pytest.mark.parametrize("mode", [0o120777, 0o040755, 0o020666, 0o100755, 0o104644])
def test_links_and_devices_and_other_modes_are_refused(mode: int) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        if info.filename.endswith(package.REPORT):
            info.external_attr = mode << 16

    assert "report.json is no plain file" in _refused(_zipped(MEMBERS, change=change))


def test_compressed_member_is_refused_before_it_is_unpacked() -> None:
    """A thousandth of the size of what it holds: a bomb."""

    def change(info: zipfile.ZipInfo) -> None:
        info.compress_type = zipfile.ZIP_DEFLATED

    bomb = _zipped(summed({**MEMBERS, package.WAIVERS: bytes(50 * 2**20)}), change=change)

    assert len(bomb) < 2**20
    assert "compressed" in _refused(bomb)


@pytest.mark.parametrize(
    "change",
    [
        lambda info: setattr(info, "date_time", (2026, 1, 1, 0, 0, 0)),
        lambda info: setattr(info, "comment", b"hello"),
        lambda info: setattr(info, "extra", b"\xfe\xca\1\0x"),
        lambda info: setattr(info, "create_system", 0),
        lambda info: setattr(info, "internal_attr", 1),
    ],
    ids=["time", "comment", "extra field", "system", "attribute"],
)
def test_other_form_is_refused(change: Callable[[zipfile.ZipInfo], None]) -> None:
    assert "form" in _refused(_zipped(MEMBERS, change=change))


def test_comment_of_the_archive_is_refused() -> None:
    assert "appended" in _refused(_zipped(MEMBERS, comment=b"hello"))


def test_directory_of_a_million_entries_is_refused_unread() -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(ARCHIVE), 0, 0)

    assert "65535 members" in _refused(ARCHIVE[:-22] + end)


def test_encrypted_member_is_refused() -> None:
    start = ARCHIVE.index(b"PK\1\2")
    changed = bytearray(ARCHIVE)
    changed[start + 8] |= 1

    assert "encrypted" in _refused(bytes(changed))


@pytest.mark.parametrize("name", [name for name in package.NAMES if name != package.SUMS])
def test_wrong_sum_is_named(name: str) -> None:
    assert f"{name} is not what SHA256SUMS says" in _refused(_zipped({**MEMBERS, name: MEMBERS[name] + b" "}))


def test_other_list_of_sums_is_refused() -> None:
    listed = MEMBERS[package.SUMS]

    assert "SHA256SUMS is not what" in _refused(_zipped({**MEMBERS, package.SUMS: listed + b"# hello\n"}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not a JSON document"),
        (b"[]", "must be an object"),
        (b'{"package": "amp-conformance-package/1", "more": 1}', "unknown key 'more'"),
        (MEMBERS[package.ABOUT].replace(b"package/1", b"package/2"), "its kind is 'amp-conformance-package/2'"),
        (b"[" * 100000, "nested too deeply"),
    ],
    ids=["no JSON", "list", "unknown key", "other kind", "deep"],
)
def test_description_that_is_none_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(package.PackageError, match=said) as caught:
        package.about({**MEMBERS, package.ABOUT: content})

    assert "\n" not in str(caught.value)
