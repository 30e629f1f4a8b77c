"""The readers of files from outside, each with the errors by which it may refuse one and files to begin from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.data import fixture
from conformance.harness import accepted, expectations, waivers
from conformance.report import document, package, surface, terminal
from tests import reports


def _report(path: Path) -> None:
    """Read a report and show it, as each command does."""
    report, _ = document.examine(path)
    terminal.render(report, short=False, width=80, report_path="report.json")


def _package(path: Path) -> None:
    """Unpack a package and read what it says of itself, as `verify` does."""
    package.about(package.unpack(package.content(path)))


def _packages() -> list[bytes]:
    return [
        package.pack(package.members(reports.path(name).read_bytes(), report, report.header.suite))
        for name, report in ((name, reports.sample(name)) for name in ("conformant", "failing"))
    ]


def _waivers(path: Path) -> None:
    waivers.read(path, {"AMP-REGION-031", "AMP-CAST-001"})


_WAIVER = """[[waiver]]
contract = "AMP-REGION-031"
cases = ["*"]
reason = "known"
owner = "us"
link = "https://example.org"
expires = 2027-12-31
torch = ">=2.6,<2.14"
target = ["cuda", "fake:*"]
"""
_CHANGE = """[[change]]
contract = "AMP-REGION-031"
op = "aten::mm"
cases = ["*"]
from = "PASS"
to = "GONE"
reason = "known"
owner = "us"
link = "https://example.org"
expires = 2027-12-31
"""


@dataclass(frozen=True)
class Reader:
    """What reads a file, the one family of errors that it may raise, and files that it accepts."""

    read: Callable[[Path], Any]
    refusal: type[Exception]
    samples: Callable[[], list[bytes]]


READERS = {
    "report": Reader(
        _report, document.ReportError, lambda: [reports.path(name).read_bytes() for name in reports.NAMES]
    ),
    "surface": Reader(surface.read, document.ReportError, lambda: [fixture("surfaces/2.6.0.json").read_bytes()]),
    "waivers": Reader(_waivers, waivers.WaiverError, lambda: [_WAIVER.encode()]),
    "accepted": Reader(lambda path: accepted.read([path]), accepted.AcceptedError, lambda: [_CHANGE.encode()]),
    "package": Reader(_package, package.PackageError, _packages),
    "expectations": Reader(
        expectations.read, expectations.ExpectationsError, lambda: [fixture("expectations.toml").read_bytes()]
    ),
}


def attempt(reader: Reader, path: Path) -> str | None:
    """Read the file at `path`; return the refusal, None where it is accepted. Any other exception is a finding."""
    try:
        reader.read(path)
    except reader.refusal as error:
        said = str(error)
        assert said, "a refusal says why"
        return said
    return None
