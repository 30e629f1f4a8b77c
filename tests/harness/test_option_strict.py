"""--strict ignores waivers and fails a run that could not tell."""

from __future__ import annotations

import pytest

from conformance.harness import waivers
from tests.conftest import Toy


def test_inconclusive_fails(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.inconclusive('noise')\n")

    assert toy.run("--strict").status == 1
    assert toy.run().status == 0


def test_waivers_are_ignored(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def shipped(known: object) -> tuple[waivers.Waiver, ...]:
        end = waivers.today().replace(year=2999)
        return (waivers.Waiver("AMP-API-001", ("*",), "known", "us", "https://example.org", end),)

    monkeypatch.setattr(waivers, "shipped", shipped)
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 2)\n")

    assert toy.run().status == 0
    strict = toy.run("--strict")
    assert strict.status == 1
    assert strict.verdicts() == {"AMP-API-001[a]": "FAIL"}


def test_excludes_waivers(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    (toy.path / "waivers.toml").write_text("")

    outcome = toy.run("--strict", "--waivers", "waivers.toml")

    assert outcome.status == 4
    assert "--strict and --waivers exclude each other" in outcome.output
