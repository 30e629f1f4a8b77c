"""Check DistributedDataParallel and ZeroRedundancyOptimizer under AMP against the same program in one process."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from . import reference
from .accumulation import OPTIONS, gradients_of_branches, gradients_of_windows
from .comparison import differences
from .optimizer_histories import histories, unlike_wrapped
from .processes import Groups
from .programs import Program
from .replica_uses import (
    averages_of_models,
    gradients_of_buckets,
    gradients_of_hooks,
    gradients_of_outputs,
    gradients_of_several_forwards,
    gradients_of_uneven_inputs,
    steps_between_averages,
    trained_after_an_exception,
    updates_of_sharded_optimizer,
)
from .support import (
    LISTED,
    agree,
    answers,
    described,
    differs_from_fp32,
    judge,
    on_a_device_each,
    one_process,
    programs,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@contract("AMP-DISTRIBUTED-001")
@on_a_device_each
@pytest.mark.parametrize(
    "way", ["ddp", *(deep("standard", one) for one in ("ddp_views", "ddp_static", "ddp_unused", "ddp_buckets"))]
)
def test_replicas(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way))


@contract("AMP-DISTRIBUTED-001", on="cpu")
@pytest.mark.parametrize("option", ["find_unused_parameters", deep("standard", "static_graph")])
def test_outputs_in_containers(case: Case, target: Target, ranks: Groups, option: str) -> None:
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, gradients_of_outputs, dtype, option)):
            what = f"rank {rank}, region of {dtype}: outputs whose gradients are not the mean"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-001", on="cpu")
def test_uneven_inputs(case: Case, target: Target, ranks: Groups) -> None:
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, gradients_of_uneven_inputs, dtype)):
            what = f"rank {rank}, region of {dtype}: gradients that are not the sum, divided as asked"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-001", on="cpu")
def test_several_forwards(case: Case, target: Target, ranks: Groups) -> None:
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, gradients_of_several_forwards, dtype, case.seed)):
            case.equal(f"rank {rank}, region of {dtype}: gradients that are not the mean", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-002")
@on_a_device_each
def test_region_in_forward(case: Case, target: Target, ranks: Groups) -> None:
    found = programs(case, target, "ddp_inside")
    agree(case, ranks, "ddp_inside", found, forward=reference.of_autocast_inside)


@contract("AMP-DISTRIBUTED-003")
@on_a_device_each
@pytest.mark.parametrize("way", ["ddp", deep("standard", "ddp_views"), deep("standard", "fsdp1"), "fsdp2"])
def test_accumulation(case: Case, target: Target, ranks: Groups, way: str) -> None:
    found = programs(case, target, way, micro=3)
    agree(case, ranks, way, found[: case.samples(quick=1, standard=1, full=len(found))], **one_process(way))


@contract("AMP-DISTRIBUTED-003", on="cpu")
@pytest.mark.parametrize("synchronized_first", [True, deep("standard", False)], ids=["after-a-step", "at-first"])
@pytest.mark.parametrize("option", [one if one == "static_graph" else deep("standard", one) for one in OPTIONS])
def test_windows_of_accumulation(
    case: Case, target: Target, ranks: Groups, option: str, synchronized_first: bool
) -> None:
    """Steps of different numbers of micro-batches, one after the other."""
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, gradients_of_windows, dtype, option, synchronized_first)):
            what = f"rank {rank}, region of {dtype}: gradients that are not the mean over the ranks"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-003", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_layers_that_some_batches_use(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in case.amp_dtypes:
        for rank, found in enumerate(answers(case, ranks, world, gradients_of_branches, dtype)):
            what = f"rank {rank}, region of {dtype}: gradients that are not the mean over the ranks"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-003", on="cpu")
@pytest.mark.parametrize("way", ["ddp", deep("standard", "ddp_views"), deep("standard", "fsdp1")])
def test_exception_without_synchronization(case: Case, target: Target, ranks: Groups, way: str) -> None:
    for dtype, forward in zip(case.amp_dtypes, (True, False), strict=False):
        program = Program("perceptron", dtype, 2, seed=case.seed + 6)
        expected = reference.steps(program, 2, **one_process(way))
        seen = answers(case, ranks, 2, trained_after_an_exception, way, program, forward)
        where = "after" if forward else "before"
        judge(case, f"{way}, {described(program)}, exception {where} forward", differences(seen, expected))


@contract("AMP-DISTRIBUTED-004")
@on_a_device_each
@pytest.mark.parametrize(
    "way",
    [
        "ddp_fp16_hook",
        deep("standard", "ddp_fp16_wrapper"),
        deep("standard", "ddp_bf16_hook"),
        deep("standard", "ddp_bf16_wrapper"),
    ],
)
def test_compression(case: Case, target: Target, ranks: Groups, way: str) -> None:
    reduced = torch.float16 if "fp16" in way else torch.bfloat16
    found = programs(case, target, way)
    agree(case, ranks, way, found, combine=reference.mean_in(reduced))
    differs_from_fp32(case, found[0], reduced)


@contract("AMP-DISTRIBUTED-004", on="cpu")
def test_compression_of_each_size(case: Case, target: Target, ranks: Groups) -> None:
    hooks = ("fp16_hook", "bf16_hook", "fp16_wrapper", "bf16_wrapper")
    for rank, found in enumerate(answers(case, ranks, 2, gradients_of_hooks, hooks)):
        case.equal(f"rank {rank}: gradients that are not the mean over the ranks", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-004", on="cpu")
def test_compression_of_several_buckets(case: Case, target: Target, ranks: Groups) -> None:
    hooks = ("fp16_hook", "bf16_hook", "fp16_wrapper", "bf16_wrapper")
    for rank, found in enumerate(answers(case, ranks, 2, gradients_of_buckets, hooks)):
        case.equal(f"rank {rank}: gradients that are not the mean over the ranks", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-005")
@on_a_device_each
@pytest.mark.parametrize("way", [deep("standard", "zero")])
def test_sharded_optimizer(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way))


@contract("AMP-DISTRIBUTED-005", on="cpu")
@pytest.mark.parametrize("optimizer", ["SGD", deep("standard", "AdamW")])
def test_sharded_optimizer_of_each_type(case: Case, target: Target, ranks: Groups, optimizer: str) -> None:
    for rank, found in enumerate(answers(case, ranks, 2, updates_of_sharded_optimizer, optimizer, case.seed)):
        case.equal(f"rank {rank}: parameters unlike those of the optimizer alone", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-005", on="cpu")
@pytest.mark.parametrize("optimizer", ["SGD", deep("standard", "AdamW")])
def test_histories_of_a_sharded_optimizer(case: Case, target: Target, ranks: Groups, optimizer: str) -> None:
    calls = histories(case.seed, case.samples(quick=1, standard=6, full=20))
    types = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
    for dtype in types[: case.samples(quick=1, standard=4, full=4)]:
        for rank, found in enumerate(answers(case, ranks, 2, unlike_wrapped, optimizer, dtype, case.seed, calls)):
            what = f"rank {rank}, {dtype}: what histories of calls leave unlike the optimizer alone"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-031", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_averages_of_models(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for rank, found in enumerate(answers(case, ranks, world, averages_of_models)):
        case.equal(f"rank {rank}: parameters that are not the mean over the ranks", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-031", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_steps_between_averages(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for rank, found in enumerate(answers(case, ranks, world, steps_between_averages)):
        case.equal(f"rank {rank}: steps that average too often or too seldom", found[:LISTED], [])
