"""The installed package beside a project that has a `conformance` folder and options of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

_CONFTEST = """
def pytest_addoption(parser):
    for name in ("--seed", "--device", "--report", "--level"):
        parser.addoption(name, default="mine")
"""
_TESTS = """
import sys
import conformance

def test_mine(request):
    assert conformance.VALUE == 1
    assert request.config.getoption("--seed") == "7"
    assert request.config.getoption("--report") == "mine"
    assert not [name for name in sys.modules if name.startswith(("torch", "amp_conformance.harness.plugin"))]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages in which the suite lies as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "conformance", folder / "amp_conformance", ignore=ignored)
    shutil.copytree(ROOT / "fixtures", folder / "amp_conformance" / "fixtures", ignore=ignored)
    metadata = folder / "amp_conformance-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: amp-conformance\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\namp_conformance = amp_conformance.harness.entrypoint\n")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of somebody else's."""
    (tmp_path / "conformance").mkdir()
    (tmp_path / "conformance" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_mine.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --seed 7\n")
    return tmp_path


def _python(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


_SCRIPT = "import sys; from amp_conformance.script import main; sys.exit(main())"


@pytest.mark.parametrize("words", [(), ("-n", "2"), ("-p", "no:randomly", "-p", "no:benchmark")])
def test_a_project_of_its_own_is_left_alone(site: Path, project: Path, words: tuple[str, ...]) -> None:
    run = _python(site, project, "-m", "pytest", "-q", *words)

    assert run.returncode == 0, run.stdout + run.stderr


def test_the_command_judges_beside_a_project(site: Path, project: Path) -> None:
    run = _python(site, project, "-c", _SCRIPT, "--contract", "AMP-API-001", "--level", "quick", "--report", "out")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "CONFORMANT" in run.stdout
    assert (project / "out" / "report.json").is_file()


def test_the_command_has_the_fixtures_of_chapters(site: Path, project: Path) -> None:
    run = _python(site, project, "-c", _SCRIPT, "--contract", "AMP-DISTRIBUTED-019", "--level", "quick")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 of 1 contract holds" in " ".join(run.stdout.split())


def test_pytest_names_what_clashes(site: Path, project: Path) -> None:
    run = _python(site, project, "-m", "pytest", "--pyargs", "amp_conformance", "--contract", "AMP-API-001")

    assert run.returncode == 4
    assert "clashes with the suite" in run.stderr
    assert "run amp-conformance instead" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_command_reads_reports(site: Path, tmp_path: Path) -> None:
    run = _python(site, tmp_path, "-c", _SCRIPT, "summary", str(ROOT / "fixtures" / "reports" / "failing.json"))

    assert run.returncode == 0, run.stderr
    assert "amp-conformance --contract" in run.stdout


def test_a_checkout_is_used_where_it_is_run(site: Path, tmp_path: Path) -> None:
    words = ("-m", "pytest", "conformance", "--contract", "AMP-API-001", "--level", "quick", "-n", "0")
    run = _python(site, ROOT, *words, "--report", str(tmp_path / "out"), "-p", "no:cacheprovider")

    assert run.returncode == 0, run.stdout + run.stderr


def test_the_self_check_is_installed(site: Path, project: Path) -> None:
    asked = ("--contract", "AMP-SCALE-060", "--contract", "AMP-REGION-030", "--self-check", "-n", "2")

    run = _python(site, project, "-c", _SCRIPT, "--level", "quick", "--device", "cpu", *asked)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "self-check: caught 2 of 2 planted faults" in run.stdout


def test_a_wheel_has_every_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="70.1", reason="a wheel is built with setuptools")
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "conformance", source / "conformance", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    shutil.copytree(ROOT / "fixtures", source / "fixtures")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = source / "conformance"
    files = {f"amp_conformance/{path.relative_to(code).as_posix()}" for path in code.rglob("*") if path.is_file()}
    # Reports and surfaces are for the tests and docs of the checkout.
    files |= {f"amp_conformance/fixtures/{path.name}" for path in (source / "fixtures").iterdir() if path.is_file()}
    script = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"

    built = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=source, capture_output=True, text=True, check=False
    )

    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert files - packed == set()
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    report = str(ROOT / "fixtures" / "reports" / "failing.json")
    for words in (("html", report), ("checklist", report, "--format", "html"), ("ci", report)):
        run = _python(site, tmp_path, "-c", _SCRIPT, *words)
        assert "NOT CONFORMANT" in run.stdout, run.stderr
