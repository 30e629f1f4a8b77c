"""The rules of docs/architecture.md: who may import whom, and what an installation holds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.data import read_toml
from tests.paths import ROOT

SUITE = ROOT / "conformance"
CHAPTERS = sorted(path.parent.name for path in SUITE.glob("chapters/*/contracts.toml"))

# What each room may import: rooms and modules of the suite, and of the two big packages.
_BELOW = {"oracles", "workloads", "measure", "scaler", "data", "torch"}
_MAY = {
    "data": set[str](),
    "version": set[str](),
    "invocation": set[str](),
    "script": {"__main__", "pytest"},
    "report": {"report", "data", "version", "invocation"},
    "measure": {"measure", "data", "torch"},
    "workloads": {"workloads", "measure.generators", "measure.onednn", "measure.pending", "data", "torch"},
    "scaler": {"scaler", "oracles.shrinking", "oracles.numbers", "data", "torch"},
    "oracles": {"oracles", "measure.flags", "measure.onednn", "measure.pending", "scaler", "data", "torch"},
    "self_check": {"self_check", "torch"},
    "harness": {
        "harness",
        "self_check",
        "report",
        "data",
        "version",
        "invocation",
        "workloads.user_workload",
        "measure.flags",  # the one table of process-wide flags, which the run reports and restores
        "measure.generators",
        "measure.health",
        "oracles.policy.declaration",
        "oracles.policy.declared",  # the op policy that a third party's device declares is set for a run
        "oracles.policy.overloads",  # the header of a report has the autocast rules of this torch
        "oracles.policy.surface",
        "oracles.policy.kernels",  # and which of them an extension registered
        "oracles.trace.reached",  # which ops a case reaches, where a surface has other rules for some
        "oracles.numbers.bits",  # case.identical() compares as the oracles do
        "measure.pending",  # what a case that failed left to a lazy device
        "measure.precision",
        "measure.refusals",
        "measure.threads",
        "torch",
        "pytest",
    },
    "commands": {
        "commands",
        "report",
        "harness",
        "oracles",
        "workloads",
        "measure",
        "version",
        "data",
        "invocation",
        "torch",
    },
    "__main__": {"commands", "report", "version", "invocation"},
    "conftest": {"harness"},
}
# Modules of a chapter that end cases or have fixtures, besides its checks and its support.py.
_WITH_THE_HARNESS = {"speed": {"experiment", "timing", "tf32", "verdict"}, "distributed": {"conftest"}}


def _modules() -> dict[str, Path]:
    """Every module of the suite by its dotted name below `conformance`."""
    return {".".join(path.relative_to(SUITE).with_suffix("").parts): path for path in SUITE.rglob("*.py")}


def _imports(name: str, path: Path) -> set[str]:
    """What a module imports: `room.module.name` of the suite, and `torch...`, `pytest...`, `tests...`."""
    found = set()
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = [] if node.level == 0 else [".", *package[: len(package) - node.level + 1]]
            found |= {".".join([*start, *(node.module or "").split("."), alias.name]) for alias in node.names}
    ours = {one[2:].replace("..", ".").lstrip(".") for one in found if one.startswith("..")}
    assert not {one for one in found if one.split(".")[0] in ("conformance", "amp_conformance")}, (
        f"{name} imports the suite by its absolute name, which an installation does not have"
    )
    return ours | {one for one in found if one.split(".")[0] in ("torch", "pytest", "tests")}


MODULES = _modules()
IMPORTS = {name: _imports(name, path) for name, path in MODULES.items()}


def _allowed(imported: str, allowed: set[str]) -> bool:
    return any(imported == one or imported.startswith(f"{one}.") for one in allowed)


@pytest.mark.parametrize("room", _MAY)
def test_rooms_import_what_lies_below_them(room: str) -> None:
    inside = {name: found for name, found in IMPORTS.items() if name.split(".")[0] == room}

    assert inside
    assert {(name, one) for name, found in inside.items() for one in found if not _allowed(one, _MAY[room])} == set()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapters_import_no_other_chapter(chapter: str) -> None:
    allowed = _BELOW | {f"chapters.{chapter}", "chapters.op_comparison"}
    with_harness = _WITH_THE_HARNESS.get(chapter, set()) | {"support"}
    strange = set()
    for name, found in IMPORTS.items():
        if name.startswith(f"chapters.{chapter}."):
            module = name.split(".")[2]
            judges = module.startswith("test_") or module in with_harness
            more = {"harness", "pytest"} if judges else set()
            strange |= {(name, one) for one in found if not _allowed(one, allowed | more)}

    assert strange == set()


def test_every_room_has_rules() -> None:
    assert {name.split(".")[0] for name in MODULES} - set(_MAY) == {"__init__", "chapters"}


def test_no_check_module_is_imported() -> None:
    checks = {name for name in MODULES if name.split(".")[-1].startswith("test_")}

    assert {(name, one) for name, found in IMPORTS.items() for one in found if _allowed(one, checks)} == set()


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


@pytest.mark.parametrize(
    "imported", ["conformance.harness.plugin, conformance.harness.options", "conformance.scaler.model"]
)
def test_loads_without_torch(root: Path, imported: str) -> None:
    """A machine without torch gets a message, not a traceback; the model of GradScaler owes torch nothing."""
    script = f"import sys\nsys.modules['torch'] = None\nimport {imported}\n"

    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr


def test_no_folder_is_left_out_of_the_installation(root: Path) -> None:
    declared = read_toml(root / "pyproject.toml")["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(root).parts) for path in SUITE.rglob("__init__.py")}

    data = {"amp_conformance.fixtures", "amp_conformance.fixtures.baselines"}
    assert sorted(declared) == sorted(data | {f"amp_{folder}" for folder in folders})


def test_parts_of_torch_are_imported_where_they_are_used() -> None:
    """What `import torch` leaves to a later import is there in one worker and not in the next, by what ran before."""
    used = {name: _chains(ast.parse(path.read_text(encoding="utf-8"))) for name, path in MODULES.items()}
    lacking = _lacking(set().union(*used.values()))

    assert [
        (name, lacking[chain])
        for name, chains in used.items()
        for chain in sorted(chains & lacking.keys())
        if not any(_allowed(imported, {lacking[chain]}) for imported in IMPORTS[name])
    ] == []


def test_a_part_of_torch_that_is_not_imported_is_found() -> None:
    program = ast.parse("torch.distributed.pipelining.Schedule1F1B(torch.amp.GradScaler, torch.not_there.at_all)")

    assert set(_lacking(_chains(program)).values()) == {"torch.distributed.pipelining"}


def _chains(tree: ast.AST) -> set[str]:
    """Return the attributes of torch that are written out, such as `torch.amp.GradScaler`."""
    return {
        words
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (words := ast.unparse(node)).startswith("torch.")
    }


def _lacking(chains: set[str]) -> dict[str, str]:
    """Return the modules that attributes lead through and that `import torch` leaves out, by attribute."""
    program = """
import importlib.util, json, sys, torch
lacking = {}
for chain in json.load(sys.stdin):
    found, names = torch, chain.split(".")
    for place, name in enumerate(names[1:], 2):
        if not hasattr(found, name):
            module = ".".join(names[:place])
            try:
                if importlib.util.find_spec(module):
                    lacking[chain] = module
            except ModuleNotFoundError:
                pass
            break
        found = getattr(found, name)
print(json.dumps(lacking))
"""
    given = json.dumps(sorted(chain for chain in chains if re.fullmatch(r"[\w.]+", chain)))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], input=given, capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(ran.stdout)
    return found
