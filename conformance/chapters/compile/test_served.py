"""Check models that inductor compiles for inference: frozen, tuned, and ahead of time."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import distance_of_chains
from .observation import Observed
from .served import MODELS, WAYS_FOR_INFERENCE, Models
from .support import bound, compiler, distance_of_ways, dtypes_of, inductor, near

IN_FLOAT32 = distance_of_chains(torch.float32, 16)
"""The distance of two ways to compute what has no 16-bit result, of up to 16 kernels."""


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
            found = iter(WAYS_FOR_INFERENCE[way](Models(calls, leaves).eval(), inputs)(*inputs))
            for model, call, given in zip(MODELS, calls, leaves, strict=True):
                expected = {f"output {number}": one for number, one in enumerate(call(*given))}
                seen = {name: next(found) for name in expected}
                limit = max(distance_of_ways(call, given), IN_FLOAT32)
                near(case, f"{dtype}, {model.name}", Observed(seen), Observed(dict(expected)), limit)
