"""The digest of the suite: the same wherever it is installed, another for any change of a file of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conformance import data
from tests.paths import ROOT


def _installed(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "conformance", folder / "amp_conformance", ignore=ignored)
    shutil.copytree(ROOT / "fixtures", folder / "amp_conformance" / "fixtures", ignore=ignored)
    return folder / "amp_conformance"


def test_installed_suite_has_the_digest_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = data.digest.__wrapped__()
    package = _installed(tmp_path)
    monkeypatch.setattr(data, "_PACKAGE", package)
    assert data.digest.__wrapped__() == expected

    for name in ("harness/catalogue.py", "chapters/scale/contracts.toml", "fixtures/waivers.toml"):
        file = package / name
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert data.digest.__wrapped__() != expected
        file.write_bytes(before.replace(b"\n", b"\r\n"))
        assert data.digest.__wrapped__() == expected
        file.write_bytes(before)
    (package / "version.py").rename(package / "versions.py")
    assert data.digest.__wrapped__() != expected
