"""Speed: AMP against fp32, in turn on an idle device, and the work that it may cost, counted."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from conformance.harness.check import Case, SuiteError, contract, deep
from conformance.harness.targets import Target, device_module
from conformance.measure.ceilings import ceilings, rate
from conformance.measure.clocks import (
    BrokenTiming,
    Clock,
    Work,
    check_clock,
    device_clock,
    repeated,
    step_clock,
)
from conformance.measure.comparison import PLANS, Comparison, Plan, compare
from conformance.measure.intervals import Interval
from conformance.measure.operations import CountedOperations
from conformance.measure.threads import one_thread
from conformance.oracles.saved import blocks, execute, predict_casts, tensors
from conformance.workloads.mlp import mlp
from conformance.workloads.training import Workload, train_step

BLOCKS = blocks()
TERA = 1e12
SIZE = 8192  # bound by arithmetic on every card there is: casts and launches take some per cent of the time


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def _accelerator(case: Case, target: Target) -> None:
    """End the case where speed cannot be judged: on a shared machine, or without the units that make AMP fast."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        case.untestable("speed is measured alone: run this chapter without -n")
    if not target.probe["tensor_cores"]:
        case.unsupported("the device has no tensor cores, and nothing is promised without them")


@contextmanager
def _tf32(case: Case, target: Target, on: bool) -> Iterator[None]:
    """TF32 in fp32 products switched on or off, and seen to be so; on other devices than CUDA there is only off."""
    if target.device_type != "cuda" or torch.version.hip is not None:
        if on:
            case.unsupported("TF32 is a mode of CUDA devices")
        yield
        return
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = on
        seen = tf32_in_effect(target.device)
        if on and not seen:
            case.unsupported("the device has no TF32")
        case.equal("TF32 in effect in the fp32 arm, as seen in a product", seen, on)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def tf32_in_effect(device: torch.device) -> bool:
    """Whether products read 10 bits of mantissa only: 1 + 2^-13 is then 1."""
    # Large enough that a library has no reason to prefer the ordinary units where TF32 is allowed.
    factor = torch.full((1024, 1024), 1 + 2.0**-13, device=device)
    ones = torch.ones(1024, 1024, device=device)
    return bool((torch.matmul(factor, ones) == 1024).all())


def _trip(case: Case, clock: Clock, work: Work) -> None:
    """Try the clock on the device; one that does not wait breaks the suite, not the contract."""
    try:
        case.note("growth of the time with four times the work", check_clock(clock, work))
    except BrokenTiming as broken:
        raise SuiteError(str(broken)) from None


def _measure(case: Case, clock: Clock, baseline: Work, candidate: Work) -> Comparison:
    """Both arms in turn, at the depth of this run."""
    _trip(case, clock, candidate)
    return compare(clock, baseline, candidate, PLANS[case.level])


def _report(case: Case, target: Target, clock: Clock, seen: Comparison, operations: float) -> Interval:
    """Put rates, ratio and interval into the evidence; a rate that the device cannot reach breaks the suite."""
    speedup = seen.speedup
    case.note("clock", clock.name)
    case.note("pairs", len(seen.baseline))
    for name, seconds in (("fp32", seen.baseline), ("AMP", seen.candidate)):
        median = statistics.median(seconds)
        case.note(f"{name}: median time", median * 1e3, "ms")
        try:
            case.note(f"{name}: rate", rate(operations, median, _ceiling(target)) / TERA, "TFLOP/s")
        except BrokenTiming as broken:
            raise SuiteError(str(broken)) from None
    case.note("speed-up: low end, median, high end", [speedup.low, speedup.estimate, speedup.high])
    case.note("confidence of the interval", speedup.coverage)
    return speedup


def _ceiling(target: Target) -> float | None:
    return ceilings(target.device).low_flops


def _judge(case: Case, speedup: Interval, threshold: float) -> None:
    """PASS where the whole interval reaches the threshold, FAIL where all of it misses, else inconclusive."""
    verdict = speedup.judge(threshold)
    if verdict is None:
        case.inconclusive(
            f"the speed-up of {speedup.estimate:.3g} lies in [{speedup.low:.3g}, {speedup.high:.3g}], "
            f"and {threshold:g} is inside"
        )
    elif verdict:
        case.at_least("low end of the speed-up", speedup.low, threshold)
    else:
        case.at_least("high end of the speed-up", speedup.high, threshold)


def _products(target: Target, dtype: torch.dtype, rng: torch.Generator, size: int, times: int = 1) -> tuple[Work, Work]:
    """A square matrix product in fp32 and the same in a region of `dtype`, casts included."""
    a, b = (torch.randn(size, size, generator=rng).to(target.device) for _ in range(2))

    def amp() -> None:
        with target.autocast(dtype):
            torch.matmul(a, b)

    return repeated(lambda: torch.matmul(a, b), times), repeated(amp, times)


def _wide_mlp(target: Target, rng: torch.Generator, width: int, rows: int) -> Workload:
    """A perceptron of four square layers with SGD."""
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(width, width, device=target.device), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    batch = tuple(torch.randn(rows, width, generator=rng).to(target.device) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Workload(model, optimizer, torch.nn.functional.mse_loss, [(batch[0], batch[1])])


def _steps(target: Target, dtype: torch.dtype, make: Callable[[], Workload]) -> tuple[Work, Work]:
    """A training step in fp32 and one with AMP, each of a model of its own."""
    arms: list[Work] = []
    for amp in (False, True):
        work = make()
        scaler = torch.amp.GradScaler(target.device_type, enabled=amp and dtype == torch.float16)

        def step(work: Workload = work, scaler: torch.amp.GradScaler = scaler, amp: bool = amp) -> None:
            train_step(work, 0, lambda: target.autocast(dtype) if amp else nullcontext(), scaler)

        arms.append(step)
    return arms[0], arms[1]


def _matmul_speedup(
    case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, tf32: bool, threshold: float
) -> None:
    _accelerator(case, target)
    clock = device_clock(target.device_type, device_module(target.device_type))
    with _tf32(case, target, tf32):
        seen = _measure(case, clock, *_products(target, dtype, rng, SIZE))
    _judge(case, _report(case, target, clock, seen, 2.0 * SIZE**3), threshold)


def _training_speedup(
    case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, tf32: bool, threshold: float
) -> None:
    _accelerator(case, target)
    width, rows = SIZE // 2, SIZE
    clock = step_clock(target.device_type, device_module(target.device_type))
    # Three products a layer, forward and backward, but for the first one's input, which needs no gradient.
    operations = 2.0 * rows * width * width * (4 * 3 - 1)
    with _tf32(case, target, tf32):
        seen = _measure(case, clock, *_steps(target, dtype, lambda: _wide_mlp(target, rng, width, rows)))
    _judge(case, _report(case, target, clock, seen, operations), threshold)


@contract("AMP-SPEED-001", on="accelerator")
def test_matmul_against_fp32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _matmul_speedup(case, target, amp_dtype, rng, tf32=False, threshold=2.0)


@contract("AMP-SPEED-002", on="accelerator")
def test_matmul_against_tf32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _matmul_speedup(case, target, amp_dtype, rng, tf32=True, threshold=1.0)


@contract("AMP-SPEED-003", on="accelerator")
def test_training_against_fp32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _training_speedup(case, target, amp_dtype, rng, tf32=False, threshold=1.5)


@contract("AMP-SPEED-004", on="accelerator")
def test_training_against_tf32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _training_speedup(case, target, amp_dtype, rng, tf32=True, threshold=1.0)


@contract("AMP-SPEED-005", on="cpu")
def test_matmul_on_the_cpu(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    size = case.samples(quick=96, standard=128, full=512)
    clock = step_clock(target.device_type, None)
    seen = _measure_small(case, clock, *_products(target, amp_dtype, rng, size))
    _report(case, target, clock, seen, 2.0 * size**3)


@contract("AMP-SPEED-006", on="cpu")
def test_training_on_the_cpu(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    clock = step_clock(target.device_type, None)
    seen = _measure_small(case, clock, *_steps(target, amp_dtype, lambda: mlp(target.device, rng)))
    # P2's products for 64 rows: 128 x 256, 256 x 256 and 256 x 10, three each but for the first layer's input.
    operations = 2.0 * 64 * (2 * 128 * 256 + 3 * 256 * 256 + 3 * 256 * 10)
    _report(case, target, clock, seen, operations)


def _measure_small(case: Case, clock: Clock, baseline: Work, candidate: Work) -> Comparison:
    """Both arms in turn within a fraction of a second: a CPU's figures are for information."""
    pairs = case.samples(quick=12, standard=16, full=50)
    return compare(clock, baseline, candidate, Plan(12, pairs, width=0.1, budget=pairs / 12, warm_ups=2))


@contract("AMP-SPEED-007")
@pytest.mark.parametrize("kind", ["device", deep("standard", "step")])
def test_noise_floor(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    if target.device_type != "cpu" and os.environ.get("PYTEST_XDIST_WORKER"):
        case.untestable("speed is measured alone: run this chapter without -n")
    module = device_module(target.device_type)
    clock = (device_clock if kind == "device" else step_clock)(target.device_type, module)
    size = 128 if target.device_type == "cpu" else 4096
    a = torch.randn(size, size, generator=rng).to(target.device)
    work = repeated(lambda: torch.matmul(a, a), 4)
    if target.device_type != "cpu":
        _trip(case, clock, work)
    pairs = case.samples(quick=12, standard=30, full=200)
    seen = compare(clock, work, work, Plan(12, pairs, width=0.01, warm_ups=5))
    case.note(
        "ratio of two equal arms: low end, median, high end",
        [seen.speedup.low, seen.speedup.estimate, seen.speedup.high],
    )
    case.note("confidence of the interval", seen.speedup.coverage)


def _counted(
    target: Target, block: str, dtype: torch.dtype | None, rng: torch.Generator, *, cache: bool = True
) -> tuple[CountedOperations, CountedOperations]:
    """Operations of a block's forward pass, in a region of `dtype` (None: outside any), and of its backward pass."""
    leaves = tensors(BLOCKS[block], target.device, rng)
    region = nullcontext() if dtype is None else target.autocast(dtype, cache_enabled=cache)
    with CountedOperations() as forward, region:
        result = execute(BLOCKS[block], leaves)
    seed = torch.ones_like(result)
    with CountedOperations() as backward:
        result.backward(seed)
    return forward, backward


def _judge_casts(case: Case, target: Target, block: str, dtype: torch.dtype, rng: torch.Generator, cache: bool) -> None:
    forward, backward = _counted(target, block, dtype, rng, cache=cache)
    predicted = predict_casts(BLOCKS[block], target.device_type, dtype, cache=cache)
    case.equal("casts forward and backward", [forward.casts, backward.casts], list(predicted))


@contract("AMP-SPEED-008")
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("block", ["linear", "mse", "conv", "tied", "frozen"])
def test_casts_follow_the_policy(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str, cache: bool
) -> None:
    _judge_casts(case, target, block, amp_dtype, rng, cache)


# Apart, because CUDA's softmax reads 16 bit and writes fp32 at once, without a cast.
@contract("AMP-SPEED-008", on="cpu")
@pytest.mark.parametrize("block", ["mlp", "attention"])
def test_casts_around_softmax_follow_the_policy(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    _judge_casts(case, target, block, amp_dtype, rng, cache=True)


@contract("AMP-SPEED-009")
@pytest.mark.parametrize("clip", [None, 1.0], ids=["plain", "unscaled-and-clipped"])
def test_the_host_waits_once_a_step(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, clip: float | None
) -> None:
    work = mlp(target.device, rng)
    # SGD: Adam counts its steps in tensors and reads them on the CPU.
    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(target.device_type)
    train_step(replace(work, optimizer=optimizer), 0, lambda: target.autocast(amp_dtype), scaler)
    inputs, labels = work.batch(1)

    def forward() -> None:
        with target.autocast(amp_dtype):
            loss.append(work.loss(work.model(inputs), labels))

    def unscale() -> None:
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(work.model.parameters(), clip)

    loss: list[torch.Tensor] = []
    reads = {}
    stages: dict[str, Work] = {
        "forward": forward,
        "scale and backward": lambda: scaler.scale(loss[0]).backward(),
        "unscale_ and clip": unscale,
        "step": lambda: scaler.step(optimizer),
        "update": lambda: scaler.update(),
    }
    for name, stage in stages.items():
        with CountedOperations() as seen:
            stage()
        reads[name] = seen.reads
    case.equal("values read back by stage", reads, {name: int(name == "step") for name in stages})


@contract("AMP-SPEED-010")
@pytest.mark.parametrize("block", ["mlp", "mse", "conv", "attention", "tied"])
def test_the_work_is_that_of_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    full, low = (_counted(target, block, dtype, rng) for dtype in (None, amp_dtype))
    for name, fp32, amp in zip(("forward", "backward"), full, low, strict=True):
        case.equal(f"operations, {name}", amp.work, fp32.work)
