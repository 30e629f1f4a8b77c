"""Check ShardedGradScaler, call by call and with every implementation of an optimizer."""

from __future__ import annotations

import pytest

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...scaler.adapters import ADAPTERS
from .processes import Groups
from .sharded_scaler import (
    IMPLEMENTATIONS,
    OPTIMIZERS,
    PLACEMENTS,
    SCALE,
    SIZE,
    defaults,
    driven,
    lacking,
    ranks_of,
    scaled_losses,
    step_in_own_group,
    steps,
    steps_beside_a_rank_without_gradients,
    steps_of_optimizers,
    steps_with_placements,
    taken_for_losses,
    unscaled,
)
from .support import LISTED, answers

pytestmark = pytest.mark.usefixtures("one_thread")

# What GradScaler promises and this scaler is documented, or made, to do otherwise: it keeps the type of a loss, takes
# fp16 gradients and ranks without any, and has a process group, which cannot be copied.
OTHERWISE = ("copies", "fp16_refusal", "narrow_losses", "no_gradients", "pickles")
DEPARTURES = tuple(name for name in ADAPTERS["fsdp"].without if name not in OTHERWISE)


@contract("AMP-DISTRIBUTED-024", on="cpu")
@pytest.mark.parametrize("more", ["common", *(deep("full", one) for one in DEPARTURES)])
def test_histories_of_calls(case: Case, target: Target, ranks: Groups, more: str) -> None:
    # Every rank plays every history, thousands of calls; the ranks of a pair do all that one alone does.
    world = case.samples(quick=1, standard=1, full=2)
    without = [*OTHERWISE, *(one for one in DEPARTURES if one != more)]
    histories = case.samples(quick=3, standard=10, full=100)
    depth = "long" if case.level == "full" else "short"
    for rank, (mismatch, calls) in enumerate(answers(case, ranks, world, driven, without, histories, case.seed, depth)):
        case.at_least(f"rank {rank}: calls", calls, 500)
        case.equal(f"rank {rank}: the shortest history that departs from GradScaler's rules", mismatch, "")


@contract("AMP-DISTRIBUTED-024", on="cpu")
def test_default_settings(case: Case, target: Target, ranks: Groups) -> None:
    expected = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    for state in answers(case, ranks, 1, defaults):
        case.equal("default settings", {name: state.get(name) for name in expected}, expected)


@contract("AMP-DISTRIBUTED-025", on="cpu")
def test_types(case: Case, target: Target, ranks: Groups) -> None:
    for wrong, asked in answers(case, ranks, 1, scaled_losses):
        case.equal(f"of {asked} losses, those that are not scaled in their own type", wrong[:LISTED], [])
    for taken in answers(case, ranks, 1, taken_for_losses):
        case.equal("what is no loss and is scaled", taken, [])
    for wrong, asked in answers(case, ranks, 1, unscaled):
        case.equal(f"of {asked} gradients, those that are not unscaled, or skipped, in their own type", wrong, [])


@contract("AMP-DISTRIBUTED-026", on="cpu")
@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("kind", ["SGD", *(deep("standard", one) for one in OPTIMIZERS if one != "SGD")])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scaler", ["sharded", "dtensor"])
def test_overflows_with_each_implementation(
    case: Case, target: Target, ranks: Groups, scaler: str, implementation: str, kind: str, explicit: bool
) -> None:
    if scaler == "dtensor" and (refused := answers(case, ranks, 2, lacking, kind, implementation)[0]):
        case.unsupported(f"no {implementation} {kind} of sharded parameters: {refused}"[:150])
    found = answers(case, ranks, 2, steps, scaler, kind, implementation, explicit)
    for rank, (clean, *overflows) in enumerate(found):
        case.equal(f"rank {rank}: exceptions", [one[0] for one in (clean, *overflows) if one[0]], [])
        case.true(f"rank {rank}: a clean step changes every element (control)", all(x != 1.0 for x in clean[1]), clean)
        case.equal(f"rank {rank}: loss scale after a clean step", clean[2], SCALE)
        for who, (_, parameter, scale) in zip(("rank 0", "rank 1", "all ranks"), overflows, strict=True):
            case.equal(f"rank {rank}: parameters where {who} overflowed", parameter, [1.0] * SIZE)
            case.equal(f"rank {rank}: loss scale where {who} overflowed", scale, SCALE / 2)


@contract("AMP-DISTRIBUTED-026", on="cpu")
@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("scaler", ["sharded", "dtensor"])
def test_overflows_of_several_optimizers(
    case: Case, target: Target, ranks: Groups, scaler: str, explicit: bool
) -> None:
    count = 3
    skipped_alone = [[int(number != overflowing) for number in range(count)] for overflowing in range(count)]
    for rank, found in enumerate(answers(case, ranks, 2, steps_of_optimizers, scaler, explicit, count)):
        what = f"rank {rank}: steps of {count} optimizers, of which the last rank overflows in each in turn"
        case.equal(what, [taken for taken, _ in found], skipped_alone)
        halved = [SCALE / 2 ** (number + 1) for number in range(count)]
        case.equal(f"rank {rank}: loss scales", [scale for _, scale in found], halved)


@contract("AMP-DISTRIBUTED-026", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_ranks_without_gradients(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for rank, (taken, scale) in enumerate(answers(case, ranks, world, steps_beside_a_rank_without_gradients)):
        case.equal(f"rank {rank}: steps", taken, 0)
        case.equal(f"rank {rank}: loss scale", scale, SCALE / 2)


@contract("AMP-DISTRIBUTED-026", on="cpu")
def test_process_groups(case: Case, target: Target, ranks: Groups) -> None:
    seen = answers(case, ranks, 2, step_in_own_group)
    case.equal("steps of each rank, of which the last overflows", [taken for taken, _ in seen], [1, 0])
    case.equal("loss scale of each rank", [scale for _, scale in seen], [SCALE, SCALE / 2])


@contract("AMP-DISTRIBUTED-027", on="cpu")
@pytest.mark.parametrize("name", [one if ranks_of(one) == 2 else deep("standard", one) for one in PLACEMENTS])
def test_overflows_with_placements(case: Case, target: Target, ranks: Groups, name: str) -> None:
    kinds = PLACEMENTS[name]
    for rank, found in enumerate(answers(case, ranks, ranks_of(name), steps_with_placements, name)):
        for number, (raised, values, scale) in enumerate(found):
            what = f"rank {rank}, an overflow in parameter {number} of {len(kinds)}"
            case.equal(f"{what}: exception", raised, "")
            case.equal(f"{what}: elements of the parameters", values, [1.0] * len(kinds))
            case.equal(f"{what}: loss scale", scale, SCALE / 2)
