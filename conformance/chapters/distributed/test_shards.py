"""Check FullyShardedDataParallel and fully_shard under AMP against the same program in one process."""

from __future__ import annotations

import pytest

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .processes import Groups
from .support import agree, differs_from_fp32, in_types_of, on_a_device_each, one_process, programs

pytestmark = pytest.mark.usefixtures("one_thread")


@contract("AMP-DISTRIBUTED-006")
@on_a_device_each
@pytest.mark.parametrize(
    "way", ["fsdp1", *(deep("standard", f"fsdp1_{one}") for one in ("grad_op", "blocks", "hybrid", "whole"))]
)
def test_fsdp1_and_autocast(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way), **one_process(way))


@contract("AMP-DISTRIBUTED-008")
@on_a_device_each
@pytest.mark.parametrize("way", ["fsdp2", *(deep("standard", f"fsdp2_{one}") for one in ("blocks", "hybrid", "kept"))])
def test_fsdp2_and_autocast(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way), **one_process(way))


# NCCL reduces nothing on the CPU, where the gradients of offloaded parameters are.


@contract("AMP-DISTRIBUTED-008", on="cpu")
@pytest.mark.parametrize("way", [deep("standard", "fsdp2_offloaded")])
def test_fsdp2_offloaded(case: Case, target: Target, ranks: Groups, way: str) -> None:
    agree(case, ranks, way, programs(case, target, way), **one_process(way))


@contract("AMP-DISTRIBUTED-009", on="cpu")
@pytest.mark.parametrize("way", [deep("standard", "fsdp2_offloaded_mixed")])
def test_fsdp2_offloaded_mixed_precision(case: Case, target: Target, ranks: Groups, way: str) -> None:
    in_16_bits(case, target, ranks, way)


@contract("AMP-DISTRIBUTED-007")
@on_a_device_each
@pytest.mark.parametrize(
    "way",
    ["fsdp1_mixed", *(deep("standard", f"fsdp1_{one}") for one in ("mixed_fp32", "reduce_low", "hybrid_mixed"))],
)
def test_fsdp1_mixed_precision(case: Case, target: Target, ranks: Groups, way: str) -> None:
    in_16_bits(case, target, ranks, way)


@contract("AMP-DISTRIBUTED-009")
@on_a_device_each
@pytest.mark.parametrize(
    "way",
    ["fsdp2_mixed", *(deep("standard", f"fsdp2_{one}") for one in ("mixed_fp32", "reduce_low", "hybrid_mixed"))],
)
def test_fsdp2_mixed_precision(case: Case, target: Target, ranks: Groups, way: str) -> None:
    in_16_bits(case, target, ranks, way)


def in_16_bits(case: Case, target: Target, ranks: Groups, way: str) -> None:
    """The way computes and reduces in the types that its policy asks for."""
    computes, reduces = "mixed" in way, not way.endswith("fp32")
    # The island is in float32 for autocast, and refuses parameters in 16 bits.
    found = programs(case, target, way, ["island"] if computes else [])
    for dtype in case.amp_dtypes:
        for program, how in (in_types_of(way, one) for one in found if one.dtype is dtype):
            agree(case, ranks, way, [program], **how)
    if reduces:
        differs_from_fp32(case, found[0], found[0].dtype)
