"""--level sets the depth: the same contracts, more cases and samples."""

from __future__ import annotations

import pytest

from tests.conftest import Toy


@pytest.mark.parametrize(
    ("asked", "operators", "samples"),
    [
        (("--level", "quick"), {"a"}, 1),
        ((), {"a", "b"}, 10),
        (("--level", "full"), {"a", "b", "c"}, 100),
    ],
)
def test_depth(toy: Toy, asked: tuple[str, ...], operators: set[str], samples: int) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@pytest.mark.parametrize('op', ['a', deep('standard', 'b'), deep('full', 'c')])\n"
        "@contract('AMP-API-001')\n"
        "def test_it(case: Case, op: str) -> None:\n"
        "    case.at_least('samples', case.samples(quick=1, standard=10, full=100), 1)\n"
    )

    outcome = toy.run(*asked)

    assert {case["parameters"]["op"] for case in outcome.report["cases"]} == operators
    assert {case["evidence"][0]["measured"] for case in outcome.report["cases"]} == {samples}


def test_seed_chooses_some_below_full(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "from conformance.harness.check import by_seed\n"
        "OPS = ['always', *(by_seed('standard', 3, f'op{n}') for n in range(8))]\n"
        "@pytest.mark.parametrize('op', OPS)\n"
        "@contract('AMP-API-001')\n"
        "def test_it(case: Case, op: str) -> None:\n"
        "    case.equal('x', 1, 1)\n"
    )

    def run(*asked: str) -> set[str]:
        return {case["parameters"]["op"] for case in toy.run(*asked).report["cases"]}

    assert run("--level", "quick") == {"always"}
    assert len(run()) == 4
    assert run() == run()
    assert len({frozenset(run("--seed", str(seed))) for seed in range(4)}) > 1
    assert len(run("--level", "full")) == 9


def test_contract_that_needs_more_depth_is_reported(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@pytest.mark.parametrize('op', [deep('full', 'c')])\n"
        "@contract('AMP-API-001')\ndef test_it(case: Case, op: str) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run("--level", "quick")

    assert outcome.report["footer"]["contracts"]["AMP-API-001"]["reason"] == "needs --level full"


def test_the_level_that_is_said_is_the_lowest_that_has_a_case(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\n@pytest.mark.parametrize('op', [deep('full', 'c')])\n"
        "def test_first(case: Case, op: str) -> None:\n    case.equal('x', 1, 1)\n\n"
        "@contract('AMP-API-001')\n@pytest.mark.parametrize('op', [deep('full', 'c'), deep('standard', 'b')])\n"
        "def test_second(case: Case, op: str) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run("--level", "quick")

    assert outcome.report["footer"]["contracts"]["AMP-API-001"]["reason"] == "needs --level standard"
    assert toy.run("--level", "standard").status == 0


def test_unknown_level_is_refused(toy: Toy) -> None:
    outcome = toy.run("--level", "deep")

    assert outcome.status == 4
    assert "quick" in outcome.output
