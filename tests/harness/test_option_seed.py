"""--seed decides every random input, whatever the order or the selection."""

from __future__ import annotations

import pytest

from tests.conftest import Toy

_CHECKS = (
    "import random\n"
    "@contract('AMP-API-001')\n"
    "def test_a(case: Case, rng: torch.Generator) -> None:\n"
    "    case.note('own', torch.rand(3, generator=rng).tolist())\n    case.true('ran', True)\n"
    "    case.note('global', torch.rand(3).tolist())\n"
    "    case.note('python', random.random())\n"
    "@contract('AMP-API-001')\n"
    "def test_b(case: Case, rng: torch.Generator) -> None:\n"
    "    case.note('own', torch.rand(3, generator=rng).tolist())\n    case.true('ran', True)\n"
)


def _drawn(toy: Toy, *arguments: str) -> dict[str, list[object]]:
    outcome = toy.run(*arguments)
    return {
        case["id"]: [row["measured"] for row in case["evidence"] if row["relation"] is None]
        for case in outcome.report["cases"]
    }


def test_draws_hang_on_the_seed_and_the_case_alone(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_CHECKS)

    first = _drawn(toy)
    again = _drawn(toy, "--seed", "0")
    alone = _drawn(toy, "-k", "test_b")
    other = _drawn(toy, "--seed", "1")

    assert first == again
    assert alone["AMP-API-001[b]"] == first["AMP-API-001[b]"]
    assert first["AMP-API-001[a]"][0] != first["AMP-API-001[b]"][0]
    assert all(first["AMP-API-001[a]"][place] != other["AMP-API-001[a]"][place] for place in range(3))


def test_seed_is_in_the_report(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_CHECKS)

    assert toy.run("--seed", "7").report["header"]["options"]["seed"] == 7


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", str(2**63)])
def test_bad_seed_is_refused(toy: Toy, seed: str) -> None:
    toy.contract("AMP-API-001")

    outcome = toy.run(f"--seed={seed}")

    assert outcome.status == 4
    assert "--seed" in outcome.output
