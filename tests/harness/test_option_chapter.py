"""--chapter and --contract choose what is judged, by name or wildcard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import reports
from tests.conftest import Toy


@pytest.fixture
def suite(toy: Toy) -> Toy:
    body = "@contract('{id}')\ndef test_{name}(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
    for id in ("AMP-API-001", "AMP-API-002", "AMP-SCALE-001", "AMP-CAST-001"):
        toy.contract(id)
    names = {"AMP-API-001": "a", "AMP-API-002": "b", "AMP-SCALE-001": "c", "AMP-CAST-001": "d"}
    toy.checks("".join(body.format(id=id, name=name) for id, name in names.items()))
    return toy


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--chapter", "api"), {"AMP-API-001", "AMP-API-002"}),
        (("--chapter", "API"), {"AMP-API-001", "AMP-API-002"}),
        (("--chapter", "s*", "--chapter", "cast"), {"AMP-SCALE-001", "AMP-CAST-001"}),
        (("--contract", "AMP-API-002"), {"AMP-API-002"}),
        (("--contract", "amp-*-001", "--chapter", "api"), {"AMP-API-001"}),
        (("--contract", "AMP-API-001", "--contract", "AMP-S*"), {"AMP-API-001", "AMP-SCALE-001"}),
    ],
)
def test_selects(suite: Toy, asked: tuple[str, ...], expected: set[str]) -> None:
    outcome = suite.run(*asked)

    assert {case["contract"] for case in outcome.report["cases"]} == expected
    assert set(outcome.report["footer"]["contracts"]) == expected
    assert outcome.status == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--chapter", "scales"), "there is no chapter 'scales'; there are cast, scale, api"),
        (("--contract", "AMP-API-009"), "there is no contract 'AMP-API-009'; the nearest are AMP-API-00"),
        (("--contract", "AMP-API-001", "--chapter", "scale"), "leave no contract"),
    ],
)
def test_unknown_names_are_refused(suite: Toy, asked: tuple[str, ...], said: str) -> None:
    outcome = suite.run(*asked)

    assert outcome.status == 4
    assert said in outcome.output
    assert "Traceback" not in outcome.output
    assert not (suite.path / "report").exists()


def test_pytests_own_selection_goes_on_working_and_is_in_the_report(suite: Toy) -> None:
    outcome = suite.run("-k", "test_a or test_d")

    assert set(outcome.verdicts()) == {"AMP-API-001[a]", "AMP-CAST-001[d]"}
    assert outcome.report["header"]["options"]["selection"] == "-k test_a or test_d"
    assert outcome.report["footer"]["contracts"]["AMP-SCALE-001"]["verdict"] is None


def test_node_id_selects_one_case(suite: Toy) -> None:
    outcome = suite.run("test_toy.py::test_c")

    assert set(outcome.verdicts()) == {"AMP-SCALE-001[c]"}


def test_a_folder_of_a_chapter_selects_it(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "conformance/chapters/bf16", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-n", "0", "--level", "quick", "--report", str(tmp_path / "report")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    report = reports.written(tmp_path / "report" / "report.json")

    assert run.returncode == 0, run.stdout
    assert report["header"]["options"]["selection"] == "conformance/chapters/bf16"
    assert {case["contract"][:8] for case in report["cases"]} == {"AMP-BF16"}
    assert not any(report["footer"]["unreached"].values())
