"""Check sharded training where forward uses, trains or is given something else from one micro-batch to the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from .placements import gradients_of_hybrid_shards, gradients_without_synchronization
from .processes import Groups
from .sharded_groups import given_gradient_types, gradients_beside_frozen, integers_in_forward, types_of_lists
from .sharded_uses import (
    HISTORIES,
    by_hand,
    held,
    input_gradients,
    input_types,
    inputs,
    output_types,
    parallel_losses,
    recomputed_gradients,
    reductions_of_replicated_parameters,
    sharded,
)
from .support import LISTED, absent, answers

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("all-one", "weights-weights")


@contract("AMP-DISTRIBUTED-029", on="cpu")
def test_casts_of_outputs(case: Case, target: Target, ranks: Groups) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        for given, asked in ((torch.float32, dtype), (dtype, torch.float32)):
            expected = {
                name: str(asked if held(value).is_floating_point() else held(value).dtype)
                for name, value in inputs(given).items()
            }
            for rank, seen in enumerate(answers(case, ranks, 2, output_types, given, asked)):
                wrong = {name: one for name, one in seen.items() if one != expected[name]}
                case.equal(f"rank {rank}, {given} with output_dtype {asked}: outputs of another type", wrong, {})


@contract("AMP-DISTRIBUTED-021", on="cpu")
@pytest.mark.parametrize("blocks", [False, deep("standard", True)], ids=["root", "blocks"])
@pytest.mark.parametrize("history", [*QUICK, *(by_seed("standard", 3, one) for one in HISTORIES if one not in QUICK)])
def test_histories_of_uses(case: Case, target: Target, ranks: Groups, history: str, blocks: bool) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        expected = by_hand(history, dtype, case.seed, 2)
        for rank, seen in enumerate(answers(case, ranks, 2, sharded, history, dtype, case.seed, blocks)):
            what = f"rank {rank}, {dtype}"
            case.equal(f"{what}: gradients", sorted(seen), sorted(expected))
            case.equal(f"{what}: their dtypes", {one.dtype for one in seen.values()}, {torch.float32})
            # The same 16-bit products in the same order; float32 sums over micro-batches and ranks in another.
            worst = max(float((seen[name] - one).norm() / one.norm()) for name, one in expected.items())
            case.at_most(f"{what}: normwise error", worst, 8 * torch.finfo(torch.float32).eps)


@contract("AMP-DISTRIBUTED-009", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_hybrid_shards(case: Case, target: Target, ranks: Groups, world: int) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        found = answers(case, ranks, world, gradients_of_hybrid_shards, dtype, (2, world // 2))
        for rank, wrong in enumerate(found):
            case.equal(f"rank {rank}, {dtype}: gradients that are not the mean", wrong[:LISTED], [])


@contract("AMP-DISTRIBUTED-007", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_micro_batches_without_synchronization(case: Case, target: Target, ranks: Groups, world: int) -> None:
    if reason := absent("fsdp1"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, wrong in enumerate(answers(case, ranks, world, gradients_without_synchronization, dtype)):
            case.equal(f"rank {rank}, {dtype}: gradients that are not the mean", wrong[:LISTED], [])


@contract("AMP-DISTRIBUTED-022", on="cpu")
@pytest.mark.parametrize("way", ["fsdp2", deep("standard", "fsdp1")])
def test_casts_of_inputs(case: Case, target: Target, ranks: Groups, way: str) -> None:
    if reason := absent(way):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        for cast in (True, False):
            expected = {"the parameter": str(dtype)}
            for name, value in inputs().items():
                given = held(value).dtype
                right = str(dtype if cast and given.is_floating_point else given)
                expected |= {name: right, f"{name}, by name": right}
            if way == "fsdp2":
                expected |= {f"{name}, in another method": right for name, right in expected.items()}
            for rank, seen in enumerate(answers(case, ranks, 2, input_types, way, dtype, cast)):
                wrong = {name: one for name, one in seen.items() if one != expected.get(name)}
                case.equal(f"rank {rank}, {dtype}, casts of inputs {cast}: inputs", len(seen), len(expected))
                case.equal(f"rank {rank}, {dtype}, casts of inputs {cast}: inputs of another type", wrong, {})


@contract("AMP-DISTRIBUTED-022", on="cpu")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1"])
def test_gradients_of_inputs(case: Case, target: Target, ranks: Groups, way: str) -> None:
    """A cast of an input is differentiated: layers in front of a sharded module are trained through it."""
    if reason := absent(way):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        for cast in (True, False):
            for rank, wrong in enumerate(answers(case, ranks, 2, input_gradients, way, dtype, cast)):
                case.equal(f"rank {rank}, {dtype}, casts of inputs {cast}: gradients that are not ones", wrong, {})


@contract("AMP-DISTRIBUTED-022", on="cpu")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1"])
def test_recomputed_casts(case: Case, target: Target, ranks: Groups, way: str) -> None:
    """A checkpoint around a sharded module computes again from inputs that are cast as they were."""
    if reason := absent(way):
        case.unsupported(reason)
    for dtype in case.amp_dtypes:
        for rank, wrong in enumerate(answers(case, ranks, 2, recomputed_gradients, way, dtype, case.seed)):
            case.equal(f"rank {rank}, {dtype}: checkpoints that change gradients", wrong, {})


@contract("AMP-DISTRIBUTED-022", on="cpu")
def test_casts_of_lists(case: Case, target: Target, ranks: Groups) -> None:
    """Each module of a list that fully_shard takes as a group has its inputs and outputs cast."""
    _judge_groups(case, ranks, types_of_lists, "modules with other types than the policy says")


@contract("AMP-DISTRIBUTED-022", on="cpu")
def test_integers_among_parameters(case: Case, target: Target, ranks: Groups) -> None:
    """Integer parameters of a module under fully_shard are no inputs to cast either."""
    _judge_groups(case, ranks, integers_in_forward, "parameters that forward sees otherwise")


@contract("AMP-DISTRIBUTED-021", on="cpu")
def test_gradients_beside_frozen_layers(case: Case, target: Target, ranks: Groups) -> None:
    _judge_groups(case, ranks, gradients_beside_frozen, "gradients that are not the mean in float32")


@contract("AMP-DISTRIBUTED-021", on="cpu")
def test_given_gradient_types(case: Case, target: Target, ranks: Groups) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        case.unsupported("tensors of this torch have no grad_dtype")
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, (types, others) in enumerate(answers(case, ranks, 2, given_gradient_types, dtype)):
            case.equal(f"rank {rank}, {dtype}: types of gradients that were asked for and lost", types[:LISTED], [])
            case.equal(f"rank {rank}, {dtype}: other attributes, or means, that were lost", others[:LISTED], [])


def _judge_groups(case: Case, ranks: Groups, work: Callable[[torch.dtype], list[str]], what: str) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, work, dtype)):
            case.equal(f"rank {rank}, {dtype}: {what}", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-021", on="cpu")
@pytest.mark.parametrize("world", [deep("standard", 4)])
def test_reduction_of_replicated_parameters(case: Case, target: Target, ranks: Groups, world: int) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    for dtype in case.amp_dtypes if case.level == "full" else case.amp_dtypes[-1:]:
        found = answers(case, ranks, world, reductions_of_replicated_parameters, dtype, case.seed)
        for rank, seen in enumerate(found):
            of_parameters = [kind for shape, kind in seen if len(shape) == 1]
            case.at_least(f"rank {rank}, {dtype}: gradients of replicated parameters", len(of_parameters), 2)
            case.equal(f"rank {rank}, {dtype}: types in which they are added up", set(of_parameters), {torch.float32})


@contract("AMP-DISTRIBUTED-023", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_parallel_losses(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in (*case.amp_dtypes, torch.float32)[: case.samples(quick=1, standard=2, full=3)]:
        for rank, found in enumerate(answers(case, ranks, world, parallel_losses, dtype, case.seed)):
            case.equal(f"rank {rank}, {dtype}: differences from the loss of whole logits", found, [])
