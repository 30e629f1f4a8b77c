"""The speed chapter whole, its cases sharing the deadline as in a run: clean cards are not blamed, in either order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.card import GTX_1660, H100, MIG_1G, RTX_4090, T4, Card, slower
from tests.simulation.checks import Outcome, cases, whole

MODULES = ("speed.test_speed", "speed.test_manual_casts", "speed.test_speedups")


def chapter(level: str, *dtypes: str) -> list[tuple[Any, Any]]:
    return [case for module in MODULES for case in cases(module, level, dtypes)]


def told(outcomes: list[Outcome], *verdicts: str) -> list[str]:
    """The outcomes with other verdicts than these."""
    return [str(outcome) for outcome in outcomes if outcome.verdict not in verdicts]


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
def test_a_clean_h100_passes_at_quick(order: int) -> None:
    seen = whole(H100, chapter("quick", "fp16", "bf16")[::order], "quick")
    judged = [outcome for outcome in seen if outcome.contract != "AMP-SPEED-004"]  # of which nothing is published
    assert told(judged, "PASS") == []


@pytest.mark.parametrize("card", [RTX_4090, T4, MIG_1G], ids=lambda card: card.name)
def test_clean_cards_of_which_less_is_expected_are_not_blamed(card: Card) -> None:
    assert told(whole(card, chapter("quick", "fp16")[::-1], "quick"), "PASS", "UNSUPPORTED", "UNTESTABLE") == []


def test_a_clean_card_that_is_slow_runs_out_of_time_and_is_not_blamed() -> None:
    seen = whole(GTX_1660, chapter("quick", "fp16", "bf16"), "quick")
    assert told(seen, "PASS", "UNSUPPORTED", "UNTESTABLE", "INCONCLUSIVE") == []


def test_a_clean_h100_passes_at_standard() -> None:
    """The cases in fp16 without the largest network, with as little time as they have beside all others."""
    chosen = [(check, given) for check, given in chapter("standard", "fp16") if "cnn" not in given["id"]]
    seen = whole(H100, chosen, "standard", planned=chapter("standard", "fp16", "bf16"))
    assert told(seen, "PASS", "UNSUPPORTED") == []
    assert {outcome.contract for outcome in seen if outcome.verdict == "PASS"} >= {"AMP-SPEED-001", "AMP-SPEED-003"}


def test_a_spent_deadline_leaves_out_information_alone() -> None:
    """A profiler that takes seconds, as that of a real card may: what is judged was measured before."""
    seen = whole(H100, chapter("quick", "fp16", "bf16"), "quick", profiling=1.7)
    late = {(outcome.contract, outcome.verdict) for outcome in seen if outcome.verdict not in ("PASS", "UNSUPPORTED")}
    assert late == {("AMP-SPEED-040", "UNTESTABLE")}


def test_a_slow_card_fails_within_the_deadline_too() -> None:
    seen = whole(H100, chapter("quick", "fp16", "bf16"), "quick", slower(15, lambda kernel: kernel.low))
    assert {"AMP-SPEED-001", "AMP-SPEED-003"} <= {outcome.contract for outcome in seen if outcome.verdict == "FAIL"}
