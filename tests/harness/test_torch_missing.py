"""Without torch, or with one that is too old, broken or stripped, the run ends with one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FAKES = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "torch is not installed"),
    "old": ("__version__ = '2.5.1+cpu'", "torch 2.5.1+cpu is too old: the suite needs 2.6 or newer"),
    "broken": ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    "half installed": ("import a_package_torch_needs", "torch cannot be imported"),
}


@pytest.mark.parametrize("name", _FAKES)
def test_says_what_is_wrong_and_exits_with_4(tmp_path: Path, root: Path, name: str) -> None:
    source, said = _FAKES[name]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"

    run = subprocess.run(
        [sys.executable, "-c", code, "conformance", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 4
    assert said in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


@pytest.mark.parametrize("package", ["tabulate", "hypothesis"])
def test_missing_test_package_is_named(root: Path, package: str) -> None:
    code = (
        "import sys, importlib.util, pytest\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", code, "conformance", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 4
    assert f"not installed: {package}" in run.stdout + run.stderr


def test_stripped_docstrings_are_refused(root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-OO", "-m", "pytest", "conformance", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 4
    assert "unset PYTHONOPTIMIZE" in run.stdout + run.stderr
