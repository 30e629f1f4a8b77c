"""A run that reached little of what was selected is PARTIAL; an accelerator that is not judged is said."""

from __future__ import annotations

import pytest

from conformance.harness import targets
from tests.conftest import Toy, foreign_device

_HOLDS = "case.true('ran', True)"
# Ten contracts of op policies, of which the suite knows those of the CPU and of torch's own accelerators.
_POLICIES = """
from conformance.harness.check import per_target

def _ops(target):
    return ["mm", "bmm"] if target.device_type in ("cpu", "cuda") else []
"""
_PER_TARGET = """
@contract("{id}", on=("real", "fake"))
@per_target("op", _ops)
def test_{name}(case: Case, target: Target, op: str) -> None:
    case.true("ran", True)
"""
_NAMED = """
@contract("{id}", on=("cpu", "cuda", "fake:cuda"))
def test_{name}(case: Case, target: Target) -> None:
    case.true("ran", True)
"""
_GENERAL = """
@contract("{id}")
def test_{name}(case: Case, target: Target) -> None:
    case.true("ran", True)
"""


@pytest.fixture
def suite(toy: Toy) -> Toy:
    source = _POLICIES
    for number, form in enumerate([_PER_TARGET] * 5 + [_NAMED] * 3 + [_GENERAL] * 2):
        id = f"AMP-CAST-{number:03}"
        toy.contract(id)
        source += form.format(id=id, name=f"c{number}")
    toy.contract("AMP-SCALE-001")
    toy.checks(source + _GENERAL.format(id="AMP-SCALE-001", name="scale"))
    return toy


@pytest.fixture
def _unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of a third party's type, with the CPU in its place, of which no op policy is declared."""
    foreign_device(monkeypatch)


@pytest.mark.usefixtures("_unknown_backend")
@pytest.mark.parametrize("others", [(), ("--device", "cpu")])
def test_backend_without_a_declared_policy_is_partial(suite: Toy, others: tuple[str, ...]) -> None:
    outcome = suite.run("--device", "npu", *others)
    footer = outcome.report["footer"]

    assert (outcome.status, footer["overall"]) == (6, "PARTIAL")
    assert footer["unreached"] == {"npu:0": [f"AMP-CAST-{number:03}" for number in range(8)]}
    output = " ".join(outcome.output.split())
    where = " on npu:0" if others else ""
    assert f"only 2 of 10 contracts of the chapter cast reached{where}, so this is no pass" in output
    assert "PARTIAL on " in output
    if not others:
        assert "nothing to try on npu:0, as no op policy of npu is known: declare it, as with --op-policy" in output


@pytest.mark.usefixtures("_unknown_backend")
@pytest.mark.parametrize("selection", [("--contract", "AMP-CAST-00[89]"), ("--chapter", "scale"), ("-k", "c8 or c9")])
def test_narrowed_run_of_what_is_reached_is_conformant(suite: Toy, selection: tuple[str, ...]) -> None:
    outcome = suite.run("--device", "npu", *selection)

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT")


@pytest.mark.parametrize(
    "options", [(), ("--device", "cpu"), ("--device", "fake:cuda"), ("-k", "c1"), ("--chapter", "scale")]
)
def test_whole_and_narrowed_runs_are_conformant(suite: Toy, options: tuple[str, ...]) -> None:
    outcome = suite.run(*options)

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT")


def test_missing_package_that_most_of_a_chapter_needs_is_partial(toy: Toy) -> None:
    source = ""
    for number, body in enumerate([_HOLDS, *["case.untestable('expecttest is not installed')"] * 2]):
        toy.contract(f"AMP-CAST-{number:03}", level="should")
        source += f"@contract('AMP-CAST-{number:03}')\ndef test_c{number}(case: Case) -> None:\n    {body}\n"
    toy.checks(source)

    outcome = toy.run()

    assert (outcome.status, outcome.report["footer"]["overall"]) == (6, "PARTIAL")
    assert "expecttest is not installed" in outcome.output


def test_cases_that_a_plugin_leaves_out_are_missing(suite: Toy) -> None:
    (suite.path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n    items[:] = [item for item in items if 'scale' in item.name]\n"
    )

    outcome = suite.run()

    assert (outcome.status, outcome.report["footer"]["overall"]) == (6, "PARTIAL")


def test_accelerator_that_is_not_judged_is_said_before_and_after(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "not_judged", lambda judged: {"cuda:0": "NVIDIA H100"})

    outcome = suite.run()

    said = "NVIDIA H100 (cuda:0) is here and NOT judged: add --gpu"
    assert outcome.output.count(said) == 2
    assert outcome.output.index(said) < outcome.output.index("CONFORMANT on cpu and fake:cuda: ")
    assert outcome.report["header"]["not_judged"] == {"cuda:0": "NVIDIA H100"}
    assert outcome.status == 0
