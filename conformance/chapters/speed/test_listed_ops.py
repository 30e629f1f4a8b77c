"""Check the operations and casts that a region runs, op by op and module by module."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import DTYPE_NAMES, Target
from ...measure.onednn import lacks_primitive
from ...oracles.policy import declared
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ..op_comparison import Arm, backward, run, side_by_side
from .module_casts import MODULES

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS = 3  # of a module in one region


def _operations(uses: int, arm: Arm, call: partial[Any]) -> dict[str, dict[str, int]]:
    with OpTrace() as forward:
        results = run(arm, call, uses)
    with OpTrace() as behind:
        backward(results)
    ways = {"forward": forward, "backward": behind}
    return {way: {**counts.work(trace.ops), "casts": counts.casts(trace.ops)} for way, trace in ways.items()}


@contract("AMP-SPEED-052")
@pytest.mark.parametrize(
    "policy",
    ["lower_precision", deep("standard", "fp32"), deep("standard", "widest"), deep("full", "unlisted")],
)
def test_an_operation_runs_as_by_hand(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, policy: str
) -> None:
    judged = 0
    # The cache serves a second use of what is cast to lower precision, and nothing else.
    measure = partial(_operations, 2 if policy == "lower_precision" else 1)
    for name, region, manual in side_by_side(target, policy, amp_dtype, rng.initial_seed(), measure):
        judged += 1
        if region != manual:
            case.equal(f"{name}: operations and casts", region, manual)
    case.at_least("operations judged", judged, 1)


@contract("AMP-SPEED-008")
def test_modules_cast_each_parameter_once(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    changed = declared.changed(target.device_type)
    for module in MODULES:
        if module.name not in changed and module.where in ("real", target.device_type):
            made, inputs = module.make(target.device, rng)
            seen = _casts(target, amp_dtype, made, inputs)
            if seen is None:
                case.note(module.name, f"oneDNN has none in {DTYPE_NAMES[amp_dtype]} on this processor")
            else:
                expected = {name: int(module.casts(name)) for name in seen}
                case.equal(f"{module.name}: casts of each parameter in {CALLS} calls", seen, expected)


def _casts(
    target: Target, amp_dtype: torch.dtype, module: torch.nn.Module, inputs: list[torch.Tensor]
) -> dict[str, int] | None:
    """Return how often each parameter is cast in `CALLS` calls; None where oneDNN has no such recurrent layer."""
    with target.autocast(amp_dtype), OpTrace() as trace:
        try:
            for _ in range(CALLS):
                module(*inputs)
        except RuntimeError as error:
            if not lacks_primitive(error):
                raise
            return None
    return {name: len(trace.casts_of(each)) for name, each in module.named_parameters()}
