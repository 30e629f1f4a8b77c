"""Check what the other ranks see of a rank that ends in the middle of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import distributed

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from . import processes
from .processes import NoGroup, Raised, RankLost, Ranks
from .programs import Program
from .support import absent
from .ways import WAYS, step

pytestmark = pytest.mark.usefixtures("one_thread")

STATUS = 7
"""The exit status of the rank that ends."""


def trained_until_one_ends(way: str, program: Program) -> int:
    """Train in this rank; the last rank ends its process before its second step. Returns the steps that were taken."""
    wrapped = WAYS[way](program)
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    for number, batches in enumerate(program.batches(rank)):
        if number == 1 and rank == last:
            os._exit(STATUS)
        step(wrapped, program, batches)
    return program.steps


@contextmanager
def own(world: int) -> Iterator[Ranks]:
    """Start a group for one case, which ends with it."""
    group = Ranks(world)
    try:
        yield group
    finally:
        group.close()


@contract("AMP-DISTRIBUTED-020", on="cpu")
@pytest.mark.parametrize("way", [deep("standard", one) for one in ("ddp", "fsdp1", "fsdp2")])
def test_a_rank_ends(case: Case, target: Target, way: str) -> None:
    if reason := processes.lacking():
        case.untestable(reason)
    if reason := absent(way):
        case.unsupported(reason)
    with own(2) as group:
        lost, answers = "none", {}
        try:
            group.call(trained_until_one_ends, way, Program("perceptron", case.amp_dtypes[0], seed=case.seed))
        except NoGroup as error:
            case.untestable(str(error))
        except RankLost as error:
            lost, answers = str(error), dict(error.answers)
    case.true("the rank that ended is named", f"rank 1 of 2 ended with exit status {STATUS}" in lost, lost)
    kinds = {rank: one.kinds if isinstance(one, Raised) else f"returned {one}" for rank, one in answers.items()}
    case.true("the other rank raises RuntimeError", "RuntimeError" in kinds.get(0, ()), kinds)
