"""Check that repeated AMP calls leak no tensors and no Python objects."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...measure.storages import LiveStorages, storage_of
from ...measure.threads import one_thread
from ...workloads.amp_uses import Uses
from .python_objects import collected_apart, kinds, least_rises, reachable, rises, tracked
from .support import scaler_state

ROUNDS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def _warmed(case: Case, target: Target) -> Uses:
    """The uses, each called twice: first calls may make what stays, such as a cache or a history of some steps."""
    uses = Uses(target.device, case.supported(target)[-1])
    for use in 2 * list(uses.all().values()):
        use()
    return uses


@contract("AMP-MEMORY-052")
@needs("storages")
def test_no_use_leaves_tensors(case: Case, target: Target) -> None:
    _warmed(case, target)  # imports of a first call would slow down each collection
    with collected_apart(), LiveStorages() as live:
        uses = _warmed(case, target)
        # By storage: cuDNN's weights are views of one buffer, with gaps perhaps (torch.nn.RNNBase.flatten_parameters).
        storages = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in uses.held()}
        held = sum(storages.values())

        def alive() -> tuple[int, ...]:
            gc.collect()
            return (live.live_bytes,)

        for name, use in uses.all().items():
            case.equal(f"{name}: bytes that each call leaves", rises(use, alive, ROUNDS), [[0] * ROUNDS])
        left = live.live_bytes - held
    case.equal("bytes alive after all uses: the scaler's state", left, scaler_state(target, stepped=True))


@contract("AMP-MEMORY-052")
@needs("storages")
def test_a_custom_function_holds_what_it_saves(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    uses = Uses(target.device, amp_dtype)
    with LiveStorages(uses.held()) as live:
        with target.autocast(amp_dtype):
            result = uses.doubled().apply(uses.weights[0].to(amp_dtype) * 2)
        case.equal("bytes alive in addition to the result", live.live_bytes - result.nbytes, 0)
        case.true("the result has a graph (control)", result.requires_grad)


def _amp() -> list[object]:
    """Return AMP's classes, functions and module variables, as they are now."""
    names = ("torch.amp", "torch.amp.grad_scaler", "torch.amp.autocast_mode")
    found = [value for name in names for value in vars(sys.modules[name]).values()]
    found += [vars(value) for value in found if isinstance(value, type) and value.__module__ in names]
    found += [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_]
    return [value for value in found if not isinstance(value, (type, types.ModuleType)) and value is not sys.modules]


@contract("AMP-MEMORY-052")
def test_no_use_leaves_objects(case: Case, target: Target) -> None:
    uses = _warmed(case, target)
    with collected_apart():
        for name, use in uses.all().items():
            before = kinds()
            least = least_rises(use, lambda: (tracked(), reachable([uses.scaler, *_amp()])))
            if any(least):
                case.note(f"{name}: new objects by type", dict((kinds() - before).most_common(8)))
            case.equal(f"{name}: objects that each call leaves, in all and on AMP's own", least, [0, 0])
