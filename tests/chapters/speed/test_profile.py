"""Profiles: whose time is whose, on events that are made up and on a real CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from conformance.chapters.speed import profile
from conformance.chapters.speed.experiment import fp32_ops
from conformance.chapters.speed.profile import CAST, observe, summed

BACKWARD = "autograd::engine::evaluate_function: "


class Events(list[Any]):
    """Events of a profile: kernels are launched by ops, microseconds each."""

    def call(self, name: str, parent: Any = None, *, kernel: float = 0.0, number: int = -1, scope: int = 0) -> Any:
        kernels = [SimpleNamespace(duration=kernel)] if kernel else []
        made = SimpleNamespace(
            name=name, cpu_parent=parent, kernels=kernels, sequence_nr=number, scope=scope, self_cpu_time_total=1.0
        )
        self.append(made)
        return made


def test_kernels_belong_to_casts_to_fp32_ops_and_to_the_rest() -> None:
    events = Events()
    linear = events.call("aten::linear", number=7)
    events.call("aten::copy_", events.call(CAST, events.call("aten::to", linear)), kernel=20)
    events.call("aten::addmm", linear, kernel=50)
    norm = events.call("aten::layer_norm", number=8)
    events.call("aten::copy_", events.call(CAST, events.call("aten::to", norm)), kernel=10)
    events.call("aten::native_layer_norm", events.call("aten::layer_norm", norm, number=9), kernel=20, number=9)

    seen = summed(events, "device", {"layer_norm"})

    assert seen is not None
    assert seen.total == pytest.approx(100e-6)
    assert seen.cast_share == pytest.approx(0.2)
    assert seen.fp32_share == pytest.approx(0.3)
    assert seen.largest_fp32_op == "layer_norm"


def test_backward_belongs_to_the_op_of_its_number() -> None:
    events = Events()
    norm = events.call("aten::layer_norm", number=8)
    events.call(CAST, events.call("aten::to", norm, number=8), number=8)
    events.call("aten::native_layer_norm", events.call("aten::layer_norm", norm, number=9), number=9)
    for number, name, kernel in ((9, "NativeLayerNormBackward0", 40), (8, "ToCopyBackward0", 10), (5, "Addmm", 50)):
        outer = events.call(f"{BACKWARD}{name}", number=number)
        events.call("aten::work", events.call(name, outer, number=number, scope=1), kernel=kernel)

    seen = summed(events, "device", {"layer_norm"})

    assert seen is not None
    assert seen.fp32_ops == {"layer_norm": pytest.approx(50e-6)}


def test_a_sum_in_backward_is_not_the_lists() -> None:
    events = Events()
    events.call("aten::addmm", number=3)
    events.call("aten::sum", events.call(f"{BACKWARD}AddmmBackward0", number=3), kernel=10)

    seen = summed(events, "device", {"sum"})

    assert seen is not None
    assert seen.fp32_ops == {}


def test_a_call_that_records_nothing_does_not_own_the_next_ones_number() -> None:
    events = Events()
    events.call("aten::softmax", number=8)  # of a tensor without a gradient
    events.call("aten::linear", number=8)
    outer = events.call(f"{BACKWARD}AddmmBackward0", number=8)
    events.call("aten::mm", outer, kernel=50)

    seen = summed(events, "device", {"softmax"})

    assert seen is not None
    assert seen.fp32_ops == {}


def test_a_profile_without_kernels_is_none() -> None:
    events = Events()
    events.call("aten::linear")
    assert summed(events, "device", set()) is None
    assert summed([], "host", set()) is None


def test_a_norm_in_fp32_is_seen_on_the_cpu() -> None:
    x, weight = torch.randn(64, 512, requires_grad=True), torch.randn(512, 512, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, weight)
            loss = F.mse_loss(y, torch.zeros_like(y))
        loss.backward()

    step()
    seen = observe(step, "cpu", fp32_ops("cpu"))

    assert seen is not None
    assert seen.where == "host"
    assert seen.largest_fp32_op == "mse_loss"
    assert 0 < seen.fp32_share < 1
    assert 0 < seen.cast_share < 1


@pytest.mark.parametrize("error", [RuntimeError("another profiler runs"), AssertionError(), NotImplementedError()])
def test_where_no_profiler_runs_there_is_no_profile(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(device_type: str) -> Any:
        raise error

    monkeypatch.setattr(profile, "_profiler", refuse)
    assert observe(lambda: None, "cuda", set()) is None


def test_memory_that_runs_out_is_not_hidden() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        observe(work, "cpu", set())


def test_a_device_that_torch_cannot_profile_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = torch.profiler.ProfilerActivity
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU})
    assert observe(lambda: None, "cuda", set()) is None


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "xpu", "mps"])
def test_the_fp32_list_is_known_for_every_device(device_type: str) -> None:
    assert {"mse_loss", "cross_entropy_loss"} & fp32_ops(device_type)


@pytest.mark.parametrize(("device_type", "name"), [("cuda", "CUDA"), ("xpu", "XPU"), ("privateuseone", "PrivateUse1")])
def test_each_device_is_profiled_by_its_activity(monkeypatch: pytest.MonkeyPatch, device_type: str, name: str) -> None:
    activity = torch.profiler.ProfilerActivity
    asked: list[Any] = []
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {getattr(activity, name)})
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: asked.extend(activities))
    profile._profiler(device_type)
    assert asked == [activity.CPU, getattr(activity, name)]
