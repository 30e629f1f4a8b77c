"""Check exact gradients, steps and states of sharded parameters of every number of rows, and ignored modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .processes import Groups
from .sharded_values import (
    changed_by_looking,
    gradients_of_one_shard,
    gradients_of_rows,
    steps_of_rows,
    types_of_ignored_classes,
    values_of_columns,
)
from .support import LISTED, absent, answers

pytestmark = pytest.mark.usefixtures("one_thread")


def _judge(
    case: Case, ranks: Groups, way: str, world: int, work: Callable[[torch.dtype], list[str]], what: str
) -> None:
    if reason := absent(way):
        case.unsupported(reason)
    turn = case.seed % len(case.amp_dtypes)
    for dtype in case.amp_dtypes[turn:][:1] if case.level == "quick" else case.amp_dtypes:
        for rank, found in enumerate(answers(case, ranks, world, work, dtype)):
            case.equal(f"rank {rank}, {dtype}: {what}", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-009", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_gradients_of_each_number_of_rows(case: Case, target: Target, ranks: Groups, world: int) -> None:
    _judge(case, ranks, "fsdp2", world, gradients_of_rows, "gradients that are not the exact quotient")


@contract("AMP-DISTRIBUTED-009", on="cpu")
@pytest.mark.parametrize(
    "reduced", ["in float16", "in a wider type", "by a sum"], ids=lambda one: one.replace(" ", "-")
)
def test_gradients_of_one_shard(case: Case, target: Target, ranks: Groups, reduced: str) -> None:
    work = partial(gradients_of_one_shard, reduced=reduced)
    _judge(case, ranks, "fsdp2", 2, work, "gradients that are not the exact quotient")


@contract("AMP-DISTRIBUTED-009", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_columns(case: Case, target: Target, ranks: Groups, world: int) -> None:
    _judge(case, ranks, "fsdp2", world, values_of_columns, "gradients and parameters that are not exact")


@contract("AMP-DISTRIBUTED-009", on="cpu")
def test_steps_of_gathered_parameters(case: Case, target: Target, ranks: Groups) -> None:
    _judge(case, ranks, "fsdp2", 2, steps_of_rows, "sums that are not those of the parameters after each step")


@contract("AMP-DISTRIBUTED-007", on="cpu")
def test_summoned_parameters_and_states(case: Case, target: Target, ranks: Groups) -> None:
    _judge(case, ranks, "fsdp1", 2, changed_by_looking, "what has other bits than the shards")


@contract("AMP-DISTRIBUTED-029", on="cpu")
def test_ignored_classes(case: Case, target: Target, ranks: Groups) -> None:
    _judge(case, ranks, "fsdp1", 2, types_of_ignored_classes, "modules in another type")
