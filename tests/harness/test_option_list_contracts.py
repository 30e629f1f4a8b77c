"""--list-contracts prints the catalogue and runs nothing."""

from __future__ import annotations

from tests.conftest import Toy


def test_lists_what_is_selected(toy: Toy) -> None:
    toy.contract("AMP-API-001", extra='since = "2.8"\n')
    toy.contract("AMP-SCALE-001", level="should", authority="engineering")

    everything = toy.run("--list-contracts")
    one = toy.run("--list-contracts", "--chapter", "scale")

    assert everything.status == one.status == 0
    assert "AMP-API-001" in everything.output
    assert "since 2.8" in everything.output
    assert "AMP-API-001" not in one.output
    assert "AMP-SCALE-001" in one.output
    assert "engineering" in one.output
    assert not (toy.path / "report").exists()
