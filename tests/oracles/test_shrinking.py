"""The shortest failing history is found within a bounded number of attempts, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from conformance.oracles.shrinking import ATTEMPTS, shortest


def digits(generator: random.Random) -> list[int]:
    return [generator.randrange(10) for _ in range(generator.randrange(1, 30))]


def smaller(digit: int) -> Iterable[int]:
    return range(digit)


def test_shortest_of_all() -> None:
    assert shortest(digits, lambda each: sum(each) > 3, count=50, seed=0, simpler=smaller) in [(4,), (1, 3), (2, 2)]
    assert shortest(digits, lambda each: 7 in each and 3 in each, count=50, seed=0) in [(3, 7), (7, 3)]


def test_nothing_that_fails() -> None:
    assert shortest(digits, lambda each: len(each) > 30, count=50, seed=0) is None


def test_attempts_are_bounded() -> None:
    calls: list[Sequence[int]] = []

    def fails(history: Sequence[int]) -> bool:
        calls.append(history)
        return len(set(history)) == len(history) or len(history) > 8

    found = shortest(digits, fails, count=5, seed=1, simpler=smaller)

    assert found in calls
    assert len(calls) <= ATTEMPTS + 5


def test_the_same_seed_draws_the_same_histories() -> None:
    def drawn(seed: int) -> list[Sequence[int]]:
        histories: list[Sequence[int]] = []

        def fails(history: Sequence[int]) -> bool:
            histories.append(history)
            return False

        shortest(digits, fails, count=20, seed=seed)
        return histories

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
