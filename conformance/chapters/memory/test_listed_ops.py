"""Check the memory of each listed op in a region against the same op with manual casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.generators import seed_torch
from ...measure.storages import PeakStorages, SavedForBackward, without_bookkeeping
from ..op_comparison import Arm, backward, run, side_by_side, tensors_of
from .support import sizes

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.needs("storages")]


def _held(uses: int, arm: Arm, call: partial[Any]) -> tuple[dict[str, object], dict[str, int]]:
    """Return the saved and live bytes, which must agree, and the peaks, which must not be higher."""
    leaves = tensors_of((call.args, call.keywords))
    with PeakStorages(leaves) as live:
        with SavedForBackward(leaves) as saved:
            results = run(arm, call, uses)
        held: dict[str, object] = {"saved for backward": sizes(without_bookkeeping(saved.storages))}
        held["alive after the forward pass"] = live.counted_bytes
        peaks = {"peak forward": live.peak_bytes}
        del saved  # which holds what it counts
        live.peak_bytes = 0
        backward(results)
        peaks["peak backward"] = live.peak_bytes
        del results
        held["alive after backward"] = live.counted_bytes
    return held, peaks


@contract("AMP-MEMORY-051")
@pytest.mark.parametrize("policy", ["lower_precision", deep("standard", "fp32"), deep("full", "unlisted")])
def test_an_operation_takes_no_more_than_by_hand(case: Case, target: Target, rng: torch.Generator, policy: str) -> None:
    dtypes = case.supported(target)
    judged = 0
    measure = partial(_held, 2 if policy == "lower_precision" else 1)
    for dtype in dtypes[: case.samples(quick=1, standard=1, full=2)]:
        for name, (held, peaks), (manual, most) in side_by_side(target, policy, dtype, rng.initial_seed(), measure):
            judged += 1
            if held != manual:
                case.equal(f"{name} in {dtype}: bytes, as with manual casts", held, manual)
            for where, bound in most.items():
                if peaks[where] > bound:
                    case.at_most(f"{name} in {dtype}: {where}, and with manual casts", peaks[where], bound, "bytes")
    case.at_least("operations judged", judged, 1)


def _left(mode: Callable[[], Any], arm: Arm, call: partial[Any]) -> tuple[int, int]:
    """Return the bytes alive after two calls, with their results and without."""
    with PeakStorages(tensors_of((call.args, call.keywords))) as live, mode():
        seed_torch(0)
        with arm():
            results = [call() for _ in range(2)]
        # In the region itself the weight cache holds casts of weights, also without gradients (AMP-CACHE-021).
        held = live.counted_bytes
        del results
    return held, live.counted_bytes


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@contract("AMP-MEMORY-051")
@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("no_grad", "lower_precision"),
        # In inference mode an op that is made of others is seen whole, below autocast's rules for these.
        ("inference_mode", "lower_precision"),
        deep("standard", "no_grad", "fp32"),
        deep("full", "no_grad", "widest"),
    ],
)
def test_an_operation_without_gradients_leaves_nothing(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str, policy: str
) -> None:
    judged = 0
    measure = partial(_left, MODES[mode])
    for name, (held, left), (manual, _) in side_by_side(target, policy, amp_dtype, rng.initial_seed(), measure):
        judged += 1
        most = manual if mode == "no_grad" else max(held, manual)
        if left or held > most:
            case.at_most(f"{name}: bytes alive with the results, and with manual casts", held, most, "bytes")
            case.equal(f"{name}: bytes alive without the results", left, 0)
    case.at_least("operations judged", judged, 1)
