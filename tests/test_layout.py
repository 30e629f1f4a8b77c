"""The house rules: who may import whom, and what no file may say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# For each folder, what it may import of the suite and of the two big packages (the design's "Who may import whom").
_MAY = {
    "harness": {
        "conformance.harness",
        "conformance.report",
        "conformance.data",
        "conformance.version",
        "conformance.workloads.own",
        "conformance.measure.health",
        "conformance.measure.threads",
        "torch",
        "pytest",
    },
    "judging": {
        "conformance.judging",
        "conformance.harness",
        "conformance.oracles",
        "conformance.workloads",
        "conformance.measure",
        "torch",
    },
    "commands": {
        "conformance.commands",
        "conformance.report",
        "conformance.harness",
        "conformance.oracles",
        "conformance.workloads",
        "conformance.measure",
        "torch",
    },
    "oracles": {"conformance.oracles", "conformance.data", "torch"},
    "workloads": {"conformance.workloads", "conformance.data", "torch"},
    "measure": {"conformance.measure", "conformance.data", "torch"},
    "report": {"conformance.report", "conformance.harness.verdicts", "conformance.data", "conformance.version"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("conformance", "torch", "pytest", "tests")}


@pytest.mark.parametrize("folder", _MAY)
def test_imports_keep_to_the_design(root: Path, folder: str) -> None:
    strange = {
        f"{path.name} imports {name}"
        for path in (root / "conformance" / folder).glob("*.py")
        for name in _imports(path)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in _MAY[folder])
    }

    assert strange == set()


def test_only_modules_of_checks_know_what_the_checks_share(root: Path) -> None:
    knowing = {
        path.relative_to(root / "conformance").parts[0]
        for path in (root / "conformance").rglob("*.py")
        if any(name.startswith("conformance.judging") for name in _imports(path))
    }

    assert {name for name in knowing if not name.startswith("test_")} == {"judging"}


def test_reports_are_read_without_torch_and_pytest(root: Path) -> None:
    script = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'pytest', '_pytest'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import pathlib, importlib\n"
        "for path in pathlib.Path('conformance/report').glob('*.py'):\n"
        "    importlib.import_module(f'conformance.report.{path.stem}')\n"
        "import conformance.__main__\n"
    )

    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr


def test_options_and_catalogue_are_read_without_torch(root: Path) -> None:
    """A machine without torch gets a message, not a traceback, so the plugin loads without it."""
    script = "import sys\nsys.modules['torch'] = None\nimport conformance.harness.plugin, conformance.harness.options\n"

    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr


def test_no_folder_is_left_out_of_the_installation(root: Path) -> None:
    declared = (root / "pyproject.toml").read_text()

    for folder in (root / "conformance").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert f'"conformance.{folder.name}"' in declared
