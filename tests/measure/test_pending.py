"""A lazy device runs what it has recorded after each step and before tensors are compared."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from conformance.measure import pending
from conformance.oracles import manual_training
from conformance.oracles.manual_training import ManualAmp
from conformance.oracles.numbers import bits
from conformance.workloads import recipes, training
from conformance.workloads.linear import linear


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("torch_xla")
    made.sync = Mock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", made)
    return made


@pytest.mark.parametrize(("device_type", "times"), [("xla", 1), ("cpu", 0), ("cuda", 0)])
def test_only_a_lazy_device_runs_what_is_pending(package: types.ModuleType, device_type: str, times: int) -> None:
    pending.run_pending(device_type)

    assert package.sync.call_count == times


def test_nothing_runs_where_the_package_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)

    pending.run_pending("xla")


def _typical() -> None:
    for _ in recipes.typical(ManualAmp("cpu", torch.bfloat16), recipes.normal(torch.device("cpu"), 0), 2):
        pass


def _train() -> None:
    work = linear(torch.device("cpu"), torch.Generator())
    training.train(work, 2, lambda: torch.autocast("cpu"), torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("module", "call", "times"),
    [
        (bits, lambda: bits.same(torch.ones(2), torch.ones(2)), 1),
        (recipes, _typical, 2),
        (manual_training, _typical, 2),
        (training, _train, 2),
    ],
    ids=["comparison", "recipe", "manual scaler", "training step"],
)
def test_each_step_and_comparison_runs_what_is_pending(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, call: Callable[[], object], times: int
) -> None:
    asked = Mock()
    monkeypatch.setattr(module, "run_pending", asked)

    call()

    assert [one.args for one in asked.call_args_list] == [("cpu",)] * times


@pytest.mark.parametrize(("device_type", "freed"), [("xla", True), ("cpu", False)])
def test_what_a_failed_case_left_in_a_cycle_is_freed_on_a_lazy_device(device_type: str, freed: bool) -> None:
    class Holder:
        """Refers to itself, as an optimizer does."""

        def __init__(self) -> None:
            self.itself = self

    gc.collect()
    left = weakref.ref(Holder())

    pending.drop_pending(device_type)

    assert (left() is None) == freed
