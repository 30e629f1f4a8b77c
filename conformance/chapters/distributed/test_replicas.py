"""Check DistributedDataParallel and ZeroRedundancyOptimizer under AMP against the same program in one process."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from . import reference
from .processes import Groups
from .support import agree, differs_from_fp32, on_a_device_each, one_process, programs

pytestmark = pytest.mark.usefixtures("one_thread")


@contract("AMP-DISTRIBUTED-001")
@on_a_device_each
@pytest.mark.parametrize(
    "way", ["ddp", *(deep("standard", one) for one in ("ddp_views", "ddp_static", "ddp_unused", "ddp_buckets"))]
)
def test_replicas(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way))


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


@contract("AMP-DISTRIBUTED-005")
@on_a_device_each
@pytest.mark.parametrize("way", [deep("standard", "zero")])
def test_sharded_optimizer(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way))
