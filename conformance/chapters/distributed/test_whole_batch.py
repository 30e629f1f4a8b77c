"""Check ranks against one process on the whole batch: losses, gradients and clipped gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from . import reference
from .clipping import WAYS as CLIPPED_WAYS
from .clipping import misclipped, types
from .comparison import differences
from .processes import Groups
from .programs import Program, Step
from .support import LISTED, absent, answers, described, in_types_of, judge, on_a_device_each, train
from .tensors import clipped

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = 2.0**-24
"""The unit roundoff of float32."""
CLIP = 0.25


@contract("AMP-DISTRIBUTED-012")
@on_a_device_each
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
@pytest.mark.parametrize(
    "way",
    ["ddp", "fsdp2", *(by_seed("standard", 2, one) for one in ("zero", "fsdp1", "fsdp2_blocks", "ddp_fp16_hook"))],
)
def test_whole_batch(case: Case, target: Target, ranks: Groups, way: str, world: int) -> None:
    found = [
        Program("perceptron", dtype, 1, seed=case.seed + number, exact=True, device_type=target.device_type)
        for number in range(case.samples(quick=1, standard=1, full=10))
        for dtype in case.amp_dtypes
    ]
    for program, seen in zip(found, train(case, ranks, world, way, found), strict=True):
        expected = reference.whole(program, world)
        mean = torch.stack([steps[0].losses[0] for steps in seen]).mean()
        case.identical(f"{described(program)}: mean of the losses", mean, expected.losses[0])
        steps = [[Step(expected.losses, one[0].gradients, one[0].parameters, one[0].scale)] for one in seen]
        judge(case, f"{way}, {described(program)}", differences(steps, [[expected]] * world))


@contract("AMP-DISTRIBUTED-013")
@on_a_device_each
@pytest.mark.parametrize("world", [2, deep("full", 4)])
@pytest.mark.parametrize(
    "way",
    [
        deep("standard", "ddp"),
        "fsdp1",
        "fsdp2",
        "fsdp1_mixed_fp32",
        *(
            deep("standard", one)
            for one in (
                "fsdp2_blocks",
                "fsdp1_mixed",
                "fsdp1_reduce_low",
                "fsdp2_mixed",
                "fsdp2_mixed_fp32",
                "fsdp2_reduce_low",
            )
        ),
    ],
)
def test_clipping(case: Case, target: Target, ranks: Groups, way: str, world: int) -> None:
    found, hows = zip(
        *(
            in_types_of(
                way, Program("perceptron", dtype, 2, {1: world - 1}, seed=case.seed + 1, device_type=target.device_type)
            )
            for dtype in case.amp_dtypes
        ),
        strict=True,
    )
    for program, how, seen in zip(found, hows, train(case, ranks, world, way, found, CLIP), strict=True):
        (expected, _), *_ = reference.steps(program, world, clip=CLIP, **how)
        assert expected.norm is not None
        elements = sum(one.numel() for one in expected.gradients.values())
        # The mean over the ranks: world - 1 sums on either side. The norm: a sum of squares of any order, whose root
        # halves the error, and its root; then a quotient and a product. Each on either side.
        bound = 2 * (world - 1 + (elements + 2) / 2 + 3) * UNIT
        if way.endswith(("mixed", "reduce_low")) and world > 2:
            bound += _of_sums(program, world, how)
        case.at_least(f"{described(program)}: norm in one process (control)", expected.norm, 2 * CLIP)
        for rank, (first, skipped) in enumerate(seen):
            assert first.norm is not None
            case.at_most(f"rank {rank}: relative error of the norm", abs(first.norm / expected.norm - 1), bound)
            worst = max(_error(first.gradients[name], one) for name, one in expected.gradients.items())
            case.at_most(f"rank {rank}: relative error of clipped gradients", worst, bound)
            kept = all(torch.equal(one, skipped.parameters[name]) for name, one in first.parameters.items())
            case.true(f"rank {rank}: a step whose norm is not finite is skipped", kept, skipped.norm)


@contract("AMP-DISTRIBUTED-013", on="cpu")
@pytest.mark.parametrize("kind", ["tiny", "16-bit"])
def test_clipping_of_distributed_tensors(case: Case, target: Target, ranks: Groups, kind: str) -> None:
    given = [(torch.float32, 2.0**-20)] if kind == "tiny" else [(dtype, 1.0) for dtype in case.amp_dtypes]
    for dtype, size in given:
        for rank, found in enumerate(answers(case, ranks, 2, clipped, case.seed, dtype, size)):
            what = f"rank {rank}, {dtype}: placements whose clipped gradients are not those of plain tensors"
            case.equal(what, found, [])


AT_QUICK = ("FULL_SHARD, original parameters, kept-beyond-float16", "FULL_SHARD, beside whole ones-within-float32")


def _clipped_cases() -> Iterator[Any]:
    for way, within in itertools.product(CLIPPED_WAYS, (True, False)):
        for dtype in types(way):
            name = f"{way}-{'within' if within else 'beyond'}-{str(dtype).removeprefix('torch.')}"
            values = (way, within, dtype)
            yield pytest.param(*values, id=name) if name in AT_QUICK else deep("standard", *values, id=name)


@contract("AMP-DISTRIBUTED-013", on="cpu")
@pytest.mark.parametrize(("way", "within", "dtype"), tuple(_clipped_cases()))
def test_clipping_of_each_size(
    case: Case, target: Target, ranks: Groups, way: str, within: bool, dtype: torch.dtype
) -> None:
    if reason := absent("fsdp2" if way == "fully_shard" else "fsdp1"):
        case.unsupported(reason)
    count = case.samples(quick=1, standard=5, full=5)
    for rank, found in enumerate(answers(case, ranks, 2, misclipped, way, dtype, within, case.seed, count)):
        case.equal(f"rank {rank}: sizes that are not clipped by the norm in float64", found[:LISTED], [])


def _of_sums(program: Program, world: int, how: Mapping[str, Any]) -> float:
    """Bound what the order of 16-bit sums over more than two ranks moves: a gradient, and with it the norm.

    Each addition rounds a part of the sum of the sizes, which cancel in the mean; on either side.
    """

    def sizes(found: Sequence[torch.Tensor]) -> torch.Tensor:
        return reference.mean([one.float().abs() for one in found])

    def gradients(combine: reference.Combine) -> torch.Tensor:
        (first, _), *_ = reference.steps(program, world, **{**how, "combine": combine})
        return torch.cat([one.flatten() for one in first.gradients.values()])

    summed, mean = gradients(sizes), gradients(reference.mean)
    cancelled = max(float(summed.norm() / mean.norm()), float(summed.max() / mean.abs().max()))
    return 4 * (world - 1) * torch.finfo(program.dtype).eps / 2 * cancelled


def _error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in parts of the largest element: cancellation makes small ones arbitrary."""
    largest = float(expected.abs().max())
    return float((seen - expected).abs().max()) / largest if largest else float(seen.abs().max())
