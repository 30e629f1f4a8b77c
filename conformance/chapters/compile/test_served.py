"""Check models that inductor compiles for inference: frozen, tuned, and ahead of time."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from .observation import observed
from .served import MODELS, WAYS_FOR_INFERENCE, Models
from .support import bound, compiler, distance_of_programs, dtypes_of, inductor, near

OTHER_WAYS = [way for way in WAYS_FOR_INFERENCE if way != "as-it-is"]


@contract("AMP-COMPILE-094")
@needs("compiled kernels")
@pytest.mark.parametrize(
    "way", [deep("full", "as-it-is"), *(by_seed("standard", 1, way) for way in WAYS_FOR_INFERENCE if way != "as-it-is")]
)
def test_served_models(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    with compiler(case), inductor(case), torch.no_grad():
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = [tuple(leaf.detach() for leaf in one.leaves(target.device, rng)) for one in MODELS]
            calls = [bound(one, target, dtype, cache=False) for one in MODELS]
            inputs = tuple(some[0] for some in leaves)
            eager = Models(calls, leaves).eval()
            served = WAYS_FOR_INFERENCE[way](Models(calls, leaves).eval(), inputs)
            limit = distance_of_programs(MODELS, target, dtype, rng)
            near(case, f"{dtype}", observed(served, inputs), observed(eager, inputs), limit)
