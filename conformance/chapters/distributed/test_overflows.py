"""Check that ranks skip together and stay equal, whichever of them overflows, and the loss scale that they agree on."""

from __future__ import annotations

import itertools

import pytest

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from ...oracles.manual_training import HandScale
from ...oracles.numbers.bits import same
from .comparison import apart
from .processes import Groups
from .programs import INTERVAL, SCALE, Program, Step
from .support import LISTED, described, histories, on_a_device_each, train, unlike_fp32

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = [deep("standard", one) for one in ("fsdp1_mixed", "fsdp2_mixed")]
WAYS = ("ddp", "zero", "fsdp1", "fsdp2", "fsdp1_mixed", "fsdp2_mixed")


@contract("AMP-DISTRIBUTED-010")
@on_a_device_each
@pytest.mark.parametrize("world", [2, deep("full", 4)])
@pytest.mark.parametrize(
    "way", ["ddp", "fsdp1", "fsdp2", *(deep("standard", one) for one in WAYS if one not in ("ddp", "fsdp1", "fsdp2"))]
)
def test_one_rank_overflows(case: Case, target: Target, ranks: Groups, way: str, world: int) -> None:
    dtype = case.amp_dtypes[world % 4 // 2 - 1]
    # Clean and overflowing steps in turn; each rank overflows once.
    overflows = {2 * rank + 1: rank for rank in range(world)}
    program = Program("perceptron", dtype, 2 * world, overflows, seed=case.seed, device_type=target.device_type)
    if "mixed" in way:
        program = unlike_fp32(program)
    (seen,) = train(case, ranks, world, way, [program])
    for rank, steps in enumerate(seen):
        moved = [_moved(before, after) for before, after in itertools.pairwise(steps)]
        case.equal(f"rank {rank}: steps that changed parameters", moved, [False, True] * (world - 1) + [False])
        case.equal(f"rank {rank}: loss scales", [one.scale for one in steps], _scales(program))


@contract("AMP-DISTRIBUTED-011")
@on_a_device_each
@pytest.mark.parametrize("world", [deep("full", 2), deep("standard", 4)])
@pytest.mark.parametrize("way", [by_seed("standard", 3, way) for way in WAYS])
def test_random_histories(case: Case, target: Target, ranks: Groups, way: str, world: int) -> None:
    dtype = case.amp_dtypes[-1]
    count = case.samples(quick=1, standard=1, full=10)
    found = histories(case, target, world, count, dtype, steps=case.samples(quick=4, standard=6, full=20))
    for program, seen in zip(found, train(case, ranks, world, way, found), strict=True):
        case.equal(f"{described(program)}: differences between ranks", apart(seen)[:LISTED], [])
        case.equal(f"{described(program)}: loss scales", [one.scale for one in seen[0]], _scales(program))
        case.history("loss scale", [SCALE, *(one.scale for one in seen[0])])


def _moved(before: Step, after: Step) -> bool:
    return not all(same(value, after.parameters[name]) for name, value in before.parameters.items())


def _scales(program: Program) -> list[float]:
    """Return the loss scale after each step, by the rules of the docstring of GradScaler."""
    rule, found = HandScale(SCALE, INTERVAL), []
    for step in range(program.steps):
        rule.update(step not in program.overflows)
        found.append(rule.scale)
    return [float(one or 0.0) for one in found]
