"""The speed chapter's verdicts on an accelerator that is made up: its clock is told how long everything takes."""

from __future__ import annotations

import datetime
import importlib
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.chapters.speed import experiment, machine_conditions, peak_rates, profile, tf32
from conformance.chapters.speed.clocks import HostClock
from conformance.chapters.speed.experiment import Experiment, Experiments
from conformance.data import fixture
from conformance.harness.catalogue import load
from conformance.harness.check import Allotment, Case
from conformance.harness.endings import ContractViolation, Inconclusive, SuiteError, Unsupported, Untestable
from conformance.harness.expectations import Expectation, Expectations, read

H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "tensor_cores": True}
CARD = {"name": "Somebody's Card", "capability": "9.9", "tensor_cores": True}
EXPECTED = Expectations((), read(fixture("expectations.toml")))


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    """The module of the checks."""
    return importlib.import_module("conformance.chapters.speed.test_speedups")


class Device:
    """Time that passes when work is done: seconds for each arm, scattered by `noise`."""

    name = "told"

    def __init__(self, fp32: float, amp: float, noise: float = 0.0, memory: int | None = None) -> None:
        self.now = 0.0
        self.rng = random.Random(0)
        self.arms = tuple(self.work(seconds, noise) for seconds in (fp32, amp))
        self.memory = memory
        self.made: list[Any] = []
        self.fails = 0  # how often memory runs out in the middle
        self.rate = math.inf  # FLOP/s of its matrix products

    def work(self, seconds: float, noise: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            if self.fails:
                self.fails -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.now += seconds * (1 + noise * self.rng.uniform(-1, 1))
            return torch.ones(1)

        return run

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


class Calm:
    """Conditions under which nothing happens, or what it is told."""

    reason: str | None = None

    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> Calm:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sample(self) -> None:
        pass

    def invalid(self, *, waiting: bool) -> str | None:
        return self.reason

    def facts(self) -> dict[str, object]:
        return {"clock after, MHz": 1755.0}


@contextmanager
def _no_modes(*_: object) -> Iterator[None]:
    yield


def _case(contract: str, level: str = "quick") -> Case:
    return Case(load().contracts[contract], level=level, seed=0, substitutions={})


def _target(probe: dict[str, Any]) -> Any:
    return SimpleNamespace(name="cuda:0", device_type="cuda", device=torch.device("cpu"), probe=probe)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Device]:
    """Put a made-up device in the place of the real one."""

    def install(*arguments: Any, ceiling: float | None = None, **options: Any) -> Device:
        made = Device(*arguments, **options)

        def arms(target: Any, spec: Experiment, subject: Any) -> Any:
            made.made.append(subject)
            return made.arms

        replaced: dict[Any, dict[str, Any]] = {
            experiment: {
                "device_module": lambda device_type: None,
                "free_bytes": lambda target: made.memory,
                "arms": arms,
                "rate_of_products": lambda *_: made.rate,
            },
            experiment.timing: {"flush": lambda target: None},
            experiment.clocks: {"device_clock": lambda *_: made, "step_clock": lambda *_: made},
            machine_conditions: {"Watch": Calm},
            tf32: {"precision": _no_modes},
            experiment.peak_rates: {
                "ceilings": lambda device: peak_rates.Ceilings(ceiling, ceiling, ceiling, None, "told"),
                "published": lambda name: peak_rates.UNKNOWN,
            },
            profile: {"observe": lambda *_: None},
        }
        for owner, names in replaced.items():
            for name, value in names.items():
                monkeypatch.setattr(owner, name, value)
        # The real trial of a clock goes by the host's time as well.
        monkeypatch.setattr(experiment.clocks, "check_clock", _growth(experiment.clocks.check_clock))
        return made

    return install


def _growth(right: Callable[..., float]) -> Callable[..., float]:
    return lambda clock, work, **_: right(clock, work)


@pytest.fixture
def judge(checks: ModuleType) -> Callable[..., Case]:
    """Run the check of the large product against fp32, and return its case."""

    def run(probe: dict[str, Any] = H100, level: str = "quick") -> Case:
        case = _case("AMP-SPEED-001", level)
        checks.test_matmul_against_fp32(case, _target(probe), torch.float16, Experiments(), EXPECTED)
        return case

    return run


def test_three_times_as_fast_passes(device: Callable[..., Device], judge: Callable[..., Case]) -> None:
    device(0.03, 0.01, noise=0.01)
    case = judge()
    assert "matmul/compute/fp16/fp32" in [evidence.name for evidence in case.evidence]
    assert case.evidence[-1].relation == ">="
    assert case.evidence[-1].measured == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("amp", [0.03, 0.02, 0.0165, 0.06], ids=["equal", "1.5", "1.8", "half"])
def test_too_slow_fails(device: Callable[..., Device], judge: Callable[..., Case], amp: float) -> None:
    device(0.03, amp, noise=0.01)
    with pytest.raises(ContractViolation, match="high end of the ratio"):
        judge()


def test_a_ratio_at_the_threshold_is_inconclusive(device: Callable[..., Device], judge: Callable[..., Case]) -> None:
    device(0.03, 0.015, noise=0.2)
    with pytest.raises(Inconclusive, match=r"and 2 is inside"):
        judge()


def test_no_verdict_is_finer_than_equal_arms(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.031, 0.015)
    assert judge().evidence[-1].holds
    monkeypatch.setattr(experiment.intervals, "noise_floor", lambda equal: 0.05)
    with pytest.raises(Inconclusive, match="and 2 is inside"):
        judge()


def test_a_spoiled_measurement_is_inconclusive(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.03, 0.01, noise=0.01)
    monkeypatch.setattr(Calm, "reason", "the device was slowed down by heat")
    with pytest.raises(Inconclusive, match=r"matmul/compute/fp16/fp32: the device was slowed down by heat"):
        judge()


def test_an_impossible_rate_breaks_the_suite(device: Callable[..., Device], judge: Callable[..., Case]) -> None:
    device(0.03, 0.01, ceiling=10e12)
    with pytest.raises(SuiteError, match=r"where the device can do 10.0 at most"):
        judge()


def test_a_clock_that_does_not_wait_breaks_the_suite(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.03, 0.01)
    ticks = iter(range(10**6))
    clock = HostClock(lambda: None, now=lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(experiment.clocks, "device_clock", lambda *_: clock)
    with pytest.raises(SuiteError, match="does not wait"):
        judge()


def test_without_tensor_cores_nothing_is_promised(device: Callable[..., Device], judge: Callable[..., Case]) -> None:
    device(0.03, 0.03)
    with pytest.raises(Unsupported, match="no tensor cores"):
        judge({**CARD, "tensor_cores": False})


def test_what_was_calibrated_is_judged_without_tensor_cores(device: Callable[..., Device], checks: ModuleType) -> None:
    day = datetime.date(2026, 1, 1)
    wanted = Expectation(0.9, "our Macs", day, "calibrated", "mac", datetime.date(2999, 1, 1))
    key = "matmul/compute/fp16/fp32"
    of_mine = SimpleNamespace(id="mac", expected=lambda asked: wanted if asked == key else None)
    mine: Any = SimpleNamespace(of=lambda *_: of_mine)
    target = _target({"name": "mps", "capability": None, "tensor_cores": False})
    target.device_type = "mps"
    for amp, verdict in ((0.03, nullcontext()), (0.04, pytest.raises(ContractViolation, match="high end"))):
        device(0.03, amp)
        with verdict:
            checks.test_matmul_against_fp32(case := _case("AMP-SPEED-001"), target, torch.float16, Experiments(), mine)
        assert "no tensor cores" not in str(case.evidence)  # nobody asked for them


def test_an_unknown_card_is_not_judged(device: Callable[..., Device], judge: Callable[..., Case]) -> None:
    made = device(0.03, 0.03)
    with pytest.raises(Unsupported, match=r"no expectations are known for Somebody's Card .* recorded, not judged"):
        judge(CARD)
    assert made.now == 0  # nor measured for nothing


def test_an_operation_without_an_expectation_is_not_judged(device: Callable[..., Device], checks: ModuleType) -> None:
    device(0.03, 0.03)
    case = _case("AMP-SPEED-031", "standard")
    with pytest.raises(Unsupported, match="there is no expectation for this"):
        checks.test_operations_as_expected(case, _target(H100), torch.float16, Experiments(), EXPECTED, "sdpa")


@pytest.mark.parametrize("ending", [Untestable, Unsupported, Inconclusive])
def test_a_failure_counts_before_what_decides_nothing(
    device: Callable[..., Device],
    checks: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    ending: type[Exception],
) -> None:
    device(0.03, 0.03)
    measure = Experiments.measure

    def measured(self: Experiments, case: Case, target: Any, spec: Experiment, among: int) -> Any:
        if spec.subject == "step-cnn" and spec.baseline == "fp32":
            raise ending("there is none of this")
        return measure(self, case, target, spec, among)

    monkeypatch.setattr(Experiments, "measure", measured)
    day = datetime.date(2026, 1, 1)
    wanted = Expectation(1.5, "ours", day, "calibrated", "ours", datetime.date(2999, 1, 1))
    all_of_it = SimpleNamespace(id="ours", expected=lambda key: wanted)
    arguments = (_target(H100), torch.float16, Experiments(), SimpleNamespace(of=lambda *_: all_of_it), "step-cnn")
    with pytest.raises(ContractViolation, match="step-cnn/compute/fp16/tf32"):
        checks.test_steps_as_expected(_case("AMP-SPEED-041", "standard"), *arguments)
    wanted = Expectation(0.5, "ours", day, "calibrated", "ours", datetime.date(2999, 1, 1))
    with pytest.raises(ending, match="there is none of this"):
        checks.test_steps_as_expected(_case("AMP-SPEED-041", "standard"), *arguments)


def test_a_noise_floor_without_end_is_named(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.03, 0.01)
    monkeypatch.setattr(experiment.intervals, "noise_floor", lambda equal: math.inf)
    with pytest.raises(Inconclusive, match="too few pairs for a noise floor"):
        judge()


def test_a_ratio_that_changes_meanwhile_is_inconclusive(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.03, 0.01, noise=0.01)
    monkeypatch.setattr(
        experiment.paired_comparison, "drifted", lambda seen, told: f"the ratio went from {told.low} to 1"
    )
    with pytest.raises(Inconclusive, match=r"fp16/fp32: the ratio went from 2\.\d+ to 1"):
        judge()


@pytest.mark.parametrize(
    ("rate", "ending", "words"),
    [
        (1e7, Untestable, r"products this device takes \d+ s for a pair of matmul/compute/fp16/fp32"),
        (1e9, Inconclusive, r"matmul/compute/fp16/fp32 needs about \d+ s"),
    ],
)
def test_a_device_in_software_is_not_waited_for(
    device: Callable[..., Device],
    judge: Callable[..., Case],
    rate: float,
    ending: type[Exception],
    words: str,
) -> None:
    made = device(0.03, 0.01)
    made.rate = rate
    with pytest.raises(ending, match=words):
        judge()
    assert not made.made


@pytest.mark.parametrize(("rate", "shrunk"), [(2e9, 8), (2e10, 4)])
def test_no_size_is_run_that_takes_longer_than_the_plan(
    device: Callable[..., Device], judge: Callable[..., Case], rate: float, shrunk: int
) -> None:
    """A run cannot be stopped midway: on a device in software the largest size takes minutes."""
    made = device(0.03, 0.01)
    made.rate = rate
    with pytest.raises(Inconclusive, match=f"fitted only at a batch {shrunk} times smaller"):
        judge()
    assert {subject.flops for subject in made.made} == {2.0 * (8192 // shrunk) ** 3}


def test_a_device_whose_rate_falls_with_the_size_is_not_waited_for(
    device: Callable[..., Device], judge: Callable[..., Case]
) -> None:
    """Its small products promise a pair in time; the smallest size takes seconds, and was run forty times before."""
    made = device(2.0, 1.0)
    with pytest.raises(Inconclusive, match="matmul/compute/fp16/fp32 needs about"):
        judge()
    assert made.now < 40


def test_the_rate_of_products_is_that_of_a_size_that_is_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 GFLOP/s whose launches take half a millisecond: 1024 is the first size that tells its rate."""
    clock = 0.0
    sizes: list[float] = []

    def arms(target: Any, spec: Experiment, subject: Any) -> Any:
        def work() -> torch.Tensor:
            nonlocal clock
            sizes.append(subject.flops)
            clock += 0.5e-3 + subject.flops / 1e11
            return torch.ones(1, 1)

        return work, work

    monkeypatch.setattr(experiment, "arms", arms)
    found = experiment.rate_of_products(_target(H100), torch.float16, lambda: clock)
    assert max(sizes) == 2.0 * 1024**3
    assert found == pytest.approx(1e11 / 2, rel=0.05)


def test_what_was_spoiled_is_measured_once_more(
    device: Callable[..., Device], checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = device(0.03, 0.01), (_target(H100), torch.float16, Experiments())
    monkeypatch.setattr(Calm, "reason", "slowed down by heat")
    check = checks.test_matmul_against_fp32
    spent = []
    for _ in range(3):
        with pytest.raises(Inconclusive, match="by heat"):
            check(_case("AMP-SPEED-001"), *given, EXPECTED)
        spent.append(made.now)
    assert spent[0] < spent[1] == spent[2]

    given = (*given[:2], Experiments())
    with pytest.raises(Inconclusive, match="by heat"):
        check(_case("AMP-SPEED-001"), *given, EXPECTED)
    monkeypatch.setattr(Calm, "reason", None)
    check(_case("AMP-SPEED-001"), *given, EXPECTED)


def test_what_was_too_large_is_gone_before_less_is_tried(
    device: Callable[..., Device], checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = device(0.4, 0.1, noise=0.01)
    alive: list[Any] = []

    def arms(target: Any, spec: Experiment, subject: Any) -> Any:
        assert [operands() for operands in alive] == [None] * len(alive)
        operands = torch.ones(1)
        alive.append(weakref.ref(operands))

        def arm(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            return lambda: operands * work()

        return tuple(map(arm, made.arms))

    monkeypatch.setattr(experiment, "arms", arms)
    checks.test_operations(
        _case("AMP-SPEED-030"), _target(H100), torch.float16, Experiments(), "bmm", "compute", "fp32"
    )
    assert len(alive) == 4


def test_one_measurement_serves_all_contracts(device: Callable[..., Device], checks: ModuleType) -> None:
    made, measured = device(0.03, 0.01, noise=0.01), Experiments()
    given = (_target(H100), torch.float16, measured)
    checks.test_operations(_case("AMP-SPEED-030"), *given, "matmul", "compute", "fp32")
    spent = made.now
    checks.test_matmul_against_fp32(_case("AMP-SPEED-001"), *given, EXPECTED)
    assert made.now == spent


def test_a_batch_that_does_not_fit_is_halved(device: Callable[..., Device], checks: ModuleType) -> None:
    made = device(0.03, 0.01, noise=0.01, memory=1 << 30)
    whole = Experiment("linear", "compute", torch.float16, "fp32").make("cuda").nbytes
    assert whole > 1 << 30
    given = (_target(H100), torch.float16, measured := Experiments())
    checks.test_operations(case := _case("AMP-SPEED-030"), *given, "linear", "compute", "fp32")
    assert made.made[-1].nbytes <= 1 << 30
    assert ["batch halved", 1] in case.evidence[-1].measured
    with pytest.raises(Inconclusive, match=r"fitted only at a batch 2 times smaller"):
        checks.test_operations_as_expected(_case("AMP-SPEED-031", "standard"), *given[:2], measured, EXPECTED, "linear")


def test_a_halved_batch_well_above_the_break_even_is_judged(
    device: Callable[..., Device], judge: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    device(0.03, 0.01, noise=0.01, memory=1 << 30)
    for rows, verdict in ((4096 / 8, True), (4096 / 8 + 1, False)):
        monkeypatch.setattr(experiment, "break_even", lambda *_, rows=rows: rows)
        with nullcontext() if verdict else pytest.raises(Inconclusive, match="near the break-even"):
            assert judge().evidence[-1].relation == ">="


def test_a_slow_device_gets_a_smaller_batch(device: Callable[..., Device], checks: ModuleType) -> None:
    """Half a second for both arms is more than a quick run has for twelve of them."""
    made = device(0.4, 0.1, noise=0.01)
    checks.test_operations(
        case := _case("AMP-SPEED-030"), _target(H100), torch.float16, Experiments(), "bmm", "compute", "fp32"
    )
    assert [subject.operands[0][0] for subject in made.made] == [64, 32, 16, 8]
    assert ["batch halved", 3] in case.evidence[-1].measured


def test_memory_that_is_never_enough_is_told(device: Callable[..., Device], checks: ModuleType) -> None:
    device(0.03, 0.01, memory=1 << 20)
    with pytest.raises(Untestable, match=r"needs 1.4 GiB of memory, 0.1 GiB at .* and 0.0 GiB are free"):
        checks.test_operations(
            _case("AMP-SPEED-030"), _target(H100), torch.float16, Experiments(), "matmul", "compute", "fp32"
        )


def test_memory_that_runs_out_in_the_middle_halves_the_batch(device: Callable[..., Device], checks: ModuleType) -> None:
    made = device(0.03, 0.01, noise=0.01, memory=1 << 40)
    made.fails = 2
    checks.test_operations(
        case := _case("AMP-SPEED-030"), _target(H100), torch.float16, Experiments(), "bmm", "compute", "fp32"
    )
    assert ["batch halved", 2] in case.evidence[-1].measured


def test_a_training_step_is_judged_by_the_wall_clock(
    device: Callable[..., Device], checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = device(0.03, 0.018, noise=0.01)
    monkeypatch.setattr(experiment.clocks, "device_clock", lambda *_: Device(1.0, 1.0))
    given = (_target({**H100, "name": "NVIDIA A100-SXM4-80GB", "capability": "8.0"}), torch.bfloat16, Experiments())
    checks.test_training_against_fp32(_case("AMP-SPEED-003"), *given, EXPECTED)
    checks.test_training_against_tf32(_case("AMP-SPEED-004"), *given, EXPECTED)
    assert made.now > 0


@pytest.mark.parametrize(
    ("seconds", "reason"), [(1e-9, "no time is left for a pair|too few"), (0.5, "too few for an interval")]
)
def test_too_few_pairs_decide_nothing(
    device: Callable[..., Device],
    checks: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    reason: str,
) -> None:
    made = device(0.03, 0.01, noise=0.01)
    case = _case("AMP-SPEED-030")
    case.allotment = Allotment(made.now + seconds, lambda words: None, lambda *_: None, lambda: made.now)
    with pytest.raises(Inconclusive, match=reason):
        checks.test_operations(case, _target(H100), torch.float16, Experiments(), "bmm", "compute", "fp32")


@pytest.mark.parametrize("on", [False, True])
def test_tf32_is_switched_seen_and_put_back(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    monkeypatch.setattr(tf32, "tf32_in_effect", lambda device: flags.allow_tf32)
    monkeypatch.setattr(tf32, "tf32_convolves", lambda device: torch.backends.cudnn.allow_tf32)
    with tf32.precision(_case("AMP-SPEED-001"), _target(H100), "tf32" if on else "fp32"):
        assert flags.allow_tf32 is on
    assert flags.allow_tf32 is before


@pytest.mark.parametrize("named", ["highest", "high", "medium"])
def test_the_precision_of_products_is_put_back(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(tf32, "tf32_in_effect", lambda device: torch.backends.cuda.matmul.allow_tf32)
    monkeypatch.setattr(tf32, "tf32_convolves", lambda device: torch.backends.cudnn.allow_tf32)
    try:
        torch.set_float32_matmul_precision(named)
        for baseline in ("fp32", "tf32"):
            with tf32.precision(_case("AMP-SPEED-001"), _target(H100), baseline):
                pass
            assert torch.get_float32_matmul_precision() == named
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("product", "convolution"), [(True, False), (False, True)])
def test_tf32_that_is_on_unnoticed_fails(monkeypatch: pytest.MonkeyPatch, product: bool, convolution: bool) -> None:
    monkeypatch.setattr(tf32, "tf32_in_effect", lambda device: product)
    monkeypatch.setattr(tf32, "tf32_convolves", lambda device: convolution)
    with (
        pytest.raises(ContractViolation, match="TF32 in effect"),
        tf32.precision(_case("AMP-SPEED-001"), _target(H100), "fp32"),
    ):
        pass


def test_a_device_without_tf32_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "tf32_in_effect", lambda device: False)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def ends(ending: type[Exception], words: str, probe: dict[str, Any]) -> None:
        case = _case("AMP-SPEED-002")
        with pytest.raises(ending, match=words), tf32.precision(case, _target(probe), "tf32"):
            pass

    ends(Unsupported, "the device has no TF32", {**CARD, "capability": "7.5"})
    ends(Inconclusive, "allowed and not in effect", H100)
    ends(Inconclusive, "allowed and not in effect", {**CARD, "capability": "12.0"})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    ends(Unsupported, "NVIDIA_TF32_OVERRIDE", H100)


@pytest.mark.parametrize("device_type", ["xpu", "mps", "cuda"])
def test_a_mode_like_tf32_is_seen_on_every_accelerator(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    target = _target(CARD)
    target.device_type = device_type
    for seen, verdict in ((False, nullcontext()), (True, pytest.raises(ContractViolation, match="TF32 in effect"))):
        monkeypatch.setattr(tf32, "tf32_in_effect", lambda device, seen=seen: seen)
        with verdict, tf32.precision(_case("AMP-SPEED-001"), target, "fp32"):
            pass
    with (
        pytest.raises(Unsupported, match="a mode of CUDA"),
        tf32.precision(_case("AMP-SPEED-002"), target, "tf32"),
    ):
        pass


def test_products_on_a_cpu_are_not_tf32() -> None:
    assert not tf32.tf32_in_effect(torch.device("cpu"))
    assert not tf32.tf32_convolves(torch.device("cpu"))


def test_a_factor_is_told_with_its_source() -> None:
    day = datetime.date(2026, 1, 1)
    words = str(Expectation(2.0, "a data sheet", day, "published", "nvidia-h100", day))
    assert "a data sheet" in words


@pytest.mark.parametrize("name", ["break_even", "noise_floor"])
def test_every_timing_is_watched_shown_and_no_finer_than_equal_arms(
    device: Callable[..., Device], checks: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    device(0.003, 0.001, noise=0.01)
    monkeypatch.setattr(Calm, "reason", "the device was slowed down by heat")
    shown: list[str] = []
    case = _case({"break_even": "AMP-SPEED-032", "noise_floor": "AMP-SPEED-007"}[name])
    case.allotment = Allotment(time.monotonic() + 60.0, shown.append, lambda *_: None)
    check = getattr(checks, f"test_{name}")
    if name == "break_even":
        check(case, _target(H100), torch.float16, Experiments(), "fp32")
        kept = [evidence.measured for evidence in case.evidence if "of the ratio" in evidence.name]
        monkeypatch.setattr(experiment.intervals, "noise_floor", lambda equal: 1.0)
        check(wide := _case("AMP-SPEED-032"), _target(H100), torch.float16, Experiments(), "fp32")
        wider = [evidence.measured for evidence in wide.evidence if "of the ratio" in evidence.name]
        assert all(more[0] < 0.5 * less[0] and more[2] > 2 * less[2] for more, less in zip(wider, kept, strict=True))
    else:
        check(case, _target(H100), Experiments(), "device")
    assert any("slowed down by heat" in str(evidence.measured) for evidence in case.evidence)
    assert any("pairs, ratio " in words for words in shown)
