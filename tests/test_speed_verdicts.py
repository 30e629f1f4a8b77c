"""The speed chapter's verdicts on an accelerator that is made up: its clock is told how long everything takes."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.harness.catalogue import load
from conformance.harness.check import (
    Case,
    ContractViolation,
    Inconclusive,
    SuiteError,
    Unsupported,
    Untestable,
)
from conformance.measure.clocks import HostClock


@pytest.fixture(scope="module")
def speed(pytestconfig: pytest.Config) -> ModuleType:
    """The chapter's module; its markers are made known here, as the suite's plugin is not loaded."""
    for marker in ("contract", "depth"):
        pytestconfig.addinivalue_line("markers", f"{marker}: of the suite")
    return importlib.import_module("conformance.test_speed")


class Device:
    """Time that passes when work is done: seconds for each arm, scattered by `noise`."""

    name = "told"

    def __init__(self, fp32: float, amp: float, noise: float = 0.0) -> None:
        self.now = 0.0
        self.rng = random.Random(0)
        self.arms = tuple(self.work(seconds, noise) for seconds in (fp32, amp))

    def work(self, seconds: float, noise: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds * (1 + noise * self.rng.uniform(-1, 1))

        return run

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


@contextmanager
def _no_modes(*_: object) -> Iterator[None]:
    yield


def _case(contract: str) -> Case:
    return Case(load().contracts[contract], level="quick", seed=0, substitutions={})


def _target(tensor_cores: bool = True) -> Any:
    return SimpleNamespace(device_type="cuda", device=torch.device("cpu"), probe={"tensor_cores": tensor_cores})


@pytest.fixture
def judge(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """Run one of the two products checks on a made-up device, and return its case."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(speed, "_tf32", _no_modes)
    monkeypatch.setattr(speed, "device_module", lambda device_type: None)

    def run(device: Any, *, ceiling: float | None = None, tensor_cores: bool = True) -> Case:
        monkeypatch.setattr(speed, "device_clock", lambda device_type, module: device)
        monkeypatch.setattr(speed, "_products", lambda *_: device.arms)
        monkeypatch.setattr(speed, "_ceiling", lambda target: ceiling)
        case = _case("AMP-SPEED-001")
        speed.test_matmul_against_fp32(case, _target(tensor_cores), torch.float16, torch.Generator())
        return case

    return run


def test_three_times_as_fast_passes(judge: Callable[..., Case]) -> None:
    case = judge(Device(0.03, 0.01, noise=0.05))
    names = [evidence.name for evidence in case.evidence]
    assert "AMP: rate" in names
    assert case.evidence[-1].measured == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("amp", [0.03, 0.02, 0.0165, 0.06], ids=["equal", "1.5", "1.8", "half"])
def test_too_slow_fails(judge: Callable[..., Case], amp: float) -> None:
    with pytest.raises(ContractViolation, match="high end of the speed-up"):
        judge(Device(0.03, amp, noise=0.02))


def test_a_ratio_at_the_threshold_is_inconclusive(judge: Callable[..., Case]) -> None:
    with pytest.raises(Inconclusive, match=r"and 2 is inside"):
        judge(Device(0.03, 0.015, noise=0.2))


def test_an_impossible_rate_breaks_the_suite(judge: Callable[..., Case]) -> None:
    with pytest.raises(SuiteError, match=r"where the device can do 10.0 at most"):
        judge(Device(0.03, 0.01), ceiling=10e12)


def test_a_clock_that_does_not_wait_breaks_the_suite(judge: Callable[..., Case]) -> None:
    ticks = iter(range(10**6))
    clock: Any = HostClock(lambda: None, now=lambda: next(ticks) * 1e-6)
    clock.arms = (lambda: None, lambda: None)
    with pytest.raises(SuiteError, match="does not wait"):
        judge(clock)


def test_without_tensor_cores_nothing_is_promised(judge: Callable[..., Case]) -> None:
    with pytest.raises(Unsupported, match="no tensor cores"):
        judge(Device(0.03, 0.03), tensor_cores=False)


def test_under_xdist_speed_is_untestable(judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(Untestable, match="without -n"):
        judge(Device(0.03, 0.01))


def test_a_training_step_is_judged_by_the_wall_clock(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.03, 0.018, noise=0.02)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(speed, "_tf32", _no_modes)
    monkeypatch.setattr(speed, "_ceiling", lambda target: None)
    monkeypatch.setattr(speed, "step_clock", lambda device_type, module: device)
    monkeypatch.setattr(speed, "_steps", lambda *_: device.arms)
    arguments = (_target(), torch.bfloat16, torch.Generator())
    speed.test_training_against_fp32(_case("AMP-SPEED-003"), *arguments)
    speed.test_training_against_tf32(_case("AMP-SPEED-004"), *arguments)


@pytest.mark.parametrize("on", [False, True])
def test_tf32_is_switched_seen_and_put_back(speed: ModuleType, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    monkeypatch.setattr(speed, "tf32_in_effect", lambda device: flags.allow_tf32)
    with speed._tf32(_case("AMP-SPEED-001"), _target(), on):
        assert flags.allow_tf32 is on
    assert flags.allow_tf32 is before


def test_tf32_that_is_on_unnoticed_fails(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "tf32_in_effect", lambda device: True)
    with (
        pytest.raises(ContractViolation, match="TF32 in effect"),
        speed._tf32(_case("AMP-SPEED-001"), _target(), False),
    ):
        pass


def test_a_device_without_tf32_is_unsupported(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "tf32_in_effect", lambda device: False)
    with pytest.raises(Unsupported, match="no TF32"), speed._tf32(_case("AMP-SPEED-002"), _target(), True):
        pass


def test_products_on_a_cpu_are_not_tf32(speed: ModuleType) -> None:
    assert not speed.tf32_in_effect(torch.device("cpu"))
