"""Check that states of scaler, model and optimizer go from one number of ranks to another."""

from __future__ import annotations

import pytest

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from . import reference
from .comparison import differences, unlike
from .processes import Groups
from .programs import INTERVAL, SCALE, Program
from .states import consolidated, loaded, loaded_alone, resumed, trained, unlike_masters
from .support import LISTED, absent, answers, in_types_of, judge, one_process

pytestmark = pytest.mark.usefixtures("one_thread")

MASTERS = ("fsdp1_mixed", "fsdp1_mixed_fp32", "fsdp2_mixed", "fsdp2_mixed_fp32", "ddp")
SAVED = 3
"""Steps before the state is taken: one is skipped, one is clean since, so that the growth tracker counts."""


@contract("AMP-DISTRIBUTED-014", on="cpu")
@pytest.mark.parametrize("other", [1, deep("standard", 4)])
@pytest.mark.parametrize(
    "way",
    ["ddp", deep("standard", "fsdp1"), "fsdp2", *(deep("standard", one) for one in ("fsdp1_mixed", "fsdp2_mixed"))],
)
def test_other_number_of_ranks(case: Case, target: Target, ranks: Groups, way: str, other: int) -> None:
    if reason := absent(way):
        case.unsupported(reason)
    dtype = case.amp_dtypes[other % len(case.amp_dtypes)]
    program, how = in_types_of(way, Program("perceptron", dtype, SAVED + 2, {1: 1, SAVED: 0}, seed=case.seed + 2))
    first, second = answers(case, ranks, 2, trained, way, program, SAVED)
    expected = reference.steps(program, 2, **how)
    case.equal("growth tracker and scale", _counts(first.scaler), (1, expected[0][SAVED - 1].scale))
    case.equal("parameters unlike one process", unlike(first.parameters, expected[0][SAVED - 1].parameters), [])
    again = [second, loaded_alone(program, first)]
    if other > 1:
        again += answers(case, ranks, other, loaded, way, program, first)
    for number, state in enumerate(again):
        where = "the other rank" if number == 0 else "one process" if number == 1 else f"rank {number - 2} of {other}"
        case.equal(f"{where}: state of the scaler", state.scaler, first.scaler)
        found = unlike(state.parameters, first.parameters) + unlike(state.momenta, first.momenta)
        case.equal(f"{where}: parameters and momenta that differ", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-014", on="cpu")
def test_consolidated_state(case: Case, target: Target, ranks: Groups) -> None:
    program = Program("perceptron", case.amp_dtypes[-1], SAVED, {1: 1}, seed=case.seed + 4)
    replica, *_ = answers(case, ranks, 2, trained, "ddp", program, SAVED)
    for rank, momenta in enumerate(answers(case, ranks, 2, consolidated, program, SAVED)):
        case.equal(f"rank {rank}: momenta unlike those of replicas", unlike(momenta, replica.momenta)[:LISTED], [])
    moved = [name for name, one in replica.momenta.items() if bool(one.any())]
    case.at_least("momenta that are not zero (control)", len(moved), 1)


@contract("AMP-DISTRIBUTED-014", on="cpu")
@pytest.mark.parametrize("way", ["fsdp2_mixed", *(deep("standard", one) for one in MASTERS if one != "fsdp2_mixed")])
def test_states_of_master_weights(case: Case, target: Target, ranks: Groups, way: str) -> None:
    if reason := absent(way):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        program, _ = in_types_of(way, Program("perceptron", dtype, 1, seed=case.seed + 7))
        for rank, found in enumerate(answers(case, ranks, 2, unlike_masters, way, program)):
            case.equal(f"rank {rank}, {dtype}: states unlike the float32 parameters", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-015", on="cpu")
@pytest.mark.parametrize("way", ["ddp", deep("standard", "fsdp1"), deep("standard", "fsdp2")])
def test_resumed(case: Case, target: Target, ranks: Groups, way: str) -> None:
    if reason := absent(way):
        case.unsupported(reason)
    program = Program("perceptron", case.amp_dtypes[-1], SAVED + 3, {1: 1, SAVED + 1: 0}, seed=case.seed + 3)
    state, _ = answers(case, ranks, 2, trained, way, program, SAVED)
    seen = answers(case, ranks, 2, resumed, way, program, state, SAVED)
    expected = [steps[SAVED:] for steps in reference.steps(program, 2, **one_process(way))]
    judge(case, f"{way}, resumed after {SAVED} steps", differences(seen, expected))
    case.history("loss scale", [SCALE, *(one.scale for one in seen[0])])


def _counts(state: dict[str, float]) -> tuple[float, float]:
    assert state["growth_interval"] == INTERVAL
    return state["_growth_tracker"], state["scale"]
