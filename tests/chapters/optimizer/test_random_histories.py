"""Random histories of iterations: their contents, shrinking and text."""

from __future__ import annotations

import random

from conformance.chapters.optimizer.random_histories import Iteration, histories, simpler


def test_histories_hold_both_kinds_of_iterations_and_start_with_either() -> None:
    made = [histories(random.Random(seed)) for seed in range(200)]
    every = [iteration for history in made for iteration in history]

    assert {history[0].clean for history in made} == {True, False}
    assert 0.3 < sum(iteration.clean for iteration in every) / len(every) < 0.7
    assert {iteration.before for iteration in every} == {"", "halve lr", "reload", "move scale"}
    assert {iteration.explicit for iteration in every} == {iteration.zeros for iteration in every} == {True, False}
    assert all(3 <= len(history) <= 8 for history in made)
    assert histories(random.Random(3)) == made[3]


def test_sparse_histories_zero_nothing_and_leave_nothing_out() -> None:
    for seed in range(50):
        for iteration in histories(random.Random(seed), sparse=True):
            assert (iteration.zeros, iteration.without) == (False, None)
        first = histories(random.Random(seed), clean_first=True)[0]
        assert first == Iteration(first.seed)


def test_every_iteration_ends_in_one_that_nothing_is_simpler_than() -> None:
    for seed in range(50):
        for iteration in histories(random.Random(seed)):
            steps = 0
            while options := list(simpler(iteration)):
                iteration, steps = options[0], steps + 1
            assert steps < 8
            assert iteration.bad in ((), ((0, 0, float("inf")),))
            assert str(iteration).startswith("clean" if iteration.clean else "inf at [0, 0]")


def test_an_iteration_reads_as_what_is_done() -> None:
    iteration = Iteration(5, ((1, 2, float("-inf")),), without=3, explicit=True, zeros=True, before="reload")

    assert str(iteration) == (
        "-inf at [1, 2], without parameter 3, unscale_(), zero_grad(set_to_none=False), first reload (slopes 5)"
    )
