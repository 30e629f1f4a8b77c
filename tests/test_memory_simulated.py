"""The memory chapter on simulated cards: clean ones pass whole, and what wastes memory fails by the right contract."""

from __future__ import annotations

import pytest

from tests.simulated_card import H100, T4, Card
from tests.simulated_checks import cases, machine, markers, run  # noqa: F401  (markers: a fixture)

MODULES = ("test_memory",)


@pytest.mark.parametrize("card", [H100, T4], ids=lambda card: card.name)
def test_clean_cards_pass(card: Card) -> None:
    for module in MODULES:
        for check, given in cases(module, dtypes=("fp16",)):
            with machine(card) as simulation:
                outcome = run(check, given, simulation)
            assert outcome.verdict == "PASS", outcome
