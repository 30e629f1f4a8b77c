"""--no-waivers ignores waivers; --require-conclusive gives a run that could not tell an exit status of its own."""

from __future__ import annotations

import pytest

from conformance.harness import waivers
from tests.conftest import Toy


def test_inconclusive_has_a_status_of_its_own(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.inconclusive('noise')\n")

    assert toy.run("--require-conclusive").status == 6
    assert toy.run().status == 0
    assert toy.run("--no-waivers").status == 0


def test_waivers_are_ignored(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def shipped(known: object) -> tuple[waivers.Waiver, ...]:
        end = waivers.today().replace(year=2999)
        return (waivers.Waiver("AMP-API-001", ("*",), "known", "us", "https://example.org", end),)

    monkeypatch.setattr(waivers, "shipped", shipped)
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 2)\n")

    assert toy.run().status == 0
    without = toy.run("--no-waivers")
    assert without.status == 1
    assert without.verdicts() == {"AMP-API-001[a]": "FAIL"}


def test_excludes_waivers(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    (toy.path / "waivers.toml").write_text("")

    outcome = toy.run("--no-waivers", "--waivers", "waivers.toml")

    assert outcome.status == 4
    assert "--no-waivers and --waivers exclude each other" in outcome.output
