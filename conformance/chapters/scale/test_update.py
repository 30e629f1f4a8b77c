"""Check that update() grows, backs off and sets the scale as documented, once for all optimizers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...scaler import model as oracle
from ...workloads.third_party_optimizers import give, owning, parameters_of
from .support import EACH_NON_FINITE, expect_traced, iterate, scale_dtype, started, track, tracker

# update() with one optimizer


@contract("AMP-SCALE-060")
@EACH_NON_FINITE
@pytest.mark.parametrize(
    "factor", [0.5, 0.25, deep("standard", 0.75), deep("standard", 2.0**-10), deep("standard", 0.0)], ids="{:g}".format
)
def test_backoff(case: Case, target: Target, bad: float, factor: float) -> None:
    scaler = started(target, backoff_factor=factor)
    optimizer = owning(torch.ones(3, device=target.device))
    expected = 65536.0
    for count in range(1, 4):
        iterate(scaler, optimizer, value=bad)
        expected = oracle.rounded(expected * factor, oracle.FP32)
        case.equal(f"scale after {count} skipped iterations", scaler.get_scale(), expected)
        case.equal("growth tracker", tracker(scaler), 0)


@contract("AMP-SCALE-060")
def test_default_backoff_halves(case: Case, target: Target) -> None:
    optimizer = owning(torch.ones(3, device=target.device))
    seen = [scale for scale, _ in track(started(target), optimizer, "!!!!")]
    case.equal("scales", seen, [32768.0, 16384.0, 8192.0, 4096.0])


@contract("AMP-SCALE-170")
@pytest.mark.parametrize("interval", [1, 2, 3, deep("standard", 10)])
@pytest.mark.parametrize("factor", [2.0, 1.5, deep("standard", 1.25), deep("standard", 1e6)], ids="{:g}".format)
def test_growth(case: Case, target: Target, interval: int, factor: float) -> None:
    scaler = started(target, init_scale=1000.0, growth_interval=interval, growth_factor=factor)
    optimizer = owning(torch.ones((), device=target.device))
    seen = [scale for scale, _ in track(scaler, optimizer, "." * (2 * interval))]
    once = oracle.rounded(1000.0 * factor, oracle.FP32)
    twice = oracle.rounded(once * factor, oracle.FP32)
    # The update() that ends the interval grows the scale.
    case.equal("scales", seen, [1000.0] * (interval - 1) + [once] * interval + [twice])


@contract("AMP-SCALE-062")
@pytest.mark.parametrize(
    ("pattern", "scales"),
    [
        ("..!...", [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]),
        ("...!...", [8.0, 8.0, 16.0, 8.0, 8.0, 8.0, 16.0]),
        ("!...", [4.0, 4.0, 4.0, 8.0]),
        (".!.!.!...", [8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0]),
        ("..!..!...", [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 4.0]),
    ],
    ids=["late", "after-growth", "at-once", "often", "twice"],
)
def test_skip_starts_the_count_again(case: Case, target: Target, pattern: str, scales: list[float]) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=3)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal(f"scales over {pattern}", [scale for scale, _ in track(scaler, optimizer, pattern)], scales)


@contract("AMP-SCALE-170")
@pytest.mark.parametrize(
    ("pattern", "counts"),
    [("......", [1, 2, 3, 0, 1, 2]), (".!..!.", [1, 0, 1, 2, 0, 1]), ("...!....", [1, 2, 3, 0, 1, 2, 3, 0])],
    ids=["clean", "skips", "skip-before-growth"],
)
def test_tracker(case: Case, target: Target, pattern: str, counts: list[int]) -> None:
    scaler = started(target, growth_interval=4)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal(f"counts over {pattern}", [count for _, count in track(scaler, optimizer, pattern)], counts)


@contract("AMP-SCALE-064")
@pytest.mark.parametrize(
    ("scale", "factor", "expected"),
    [
        (2.0**127, 2.0, [2.0**127] * 3),
        (2.0**126, 2.0, [2.0**127] * 3),
        (oracle.FP32.largest, 1 + 2**-20, [oracle.FP32.largest] * 3),
        (2.0**100, 1e30, [2.0**100] * 3),
    ],
    ids=["at-the-top", "up-to-the-top", "largest", "huge-factor"],
)
def test_growth_stays_finite(case: Case, target: Target, scale: float, factor: float, expected: list[float]) -> None:
    scaler = started(target, init_scale=scale, growth_factor=factor, growth_interval=1)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal("scales and counts", track(scaler, optimizer, "..."), [(kept, 0) for kept in expected])


@contract("AMP-SCALE-065")
def test_scale_below_one(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=1.0)
    optimizer = owning(torch.ones((), device=target.device))
    seen = [scale for scale, _ in track(scaler, optimizer, "!" * 5)]
    case.equal("scales", seen, [0.5, 0.25, 0.125, 0.0625, 0.03125])
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    case.equal("a gradient of 1, unscaled by 1/32", parameters_of(optimizer)[0].grad.item(), 32.0)


@contract("AMP-SCALE-066")
def test_setters(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=64.0, growth_interval=100)
    optimizer = owning(torch.ones((), device=target.device))
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(2)
    seen = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    case.equal("settings read back", seen, (4.0, 0.125, 2))
    case.equal("scales and counts", track(scaler, optimizer, "..!"), [(64.0, 1), (256.0, 0), (32.0, 0)])
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.5)
    case.equal("scales and counts, set again", track(scaler, optimizer, ".!"), [(256.0, 0), (128.0, 0)])


@contract("AMP-SCALE-067")
@pytest.mark.parametrize("interval", [1, 2, 3], ids=["far-below", "below", "at"])
def test_lowered_growth_interval(case: Case, target: Target, interval: int) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=100)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal("control: no growth so far", track(scaler, optimizer, "...")[-1], (8.0, 3))
    scaler.set_growth_interval(interval)
    grown = max(scale for scale, _ in track(scaler, optimizer, "." * 4))
    case.at_least("largest scale within four more clean iterations", grown, 16.0)


NEW_SCALES = (1024.0, 3.0, 0.1, deep("standard", 2.0**127), deep("standard", 2.0**-140), deep("standard", 1.0))


@contract("AMP-SCALE-068")
@pytest.mark.parametrize("new_scale", NEW_SCALES, ids="{:g}".format)
def test_update_with_a_float(case: Case, target: Target, new_scale: float) -> None:
    scaler = started(target)
    scaler.update(new_scale)
    expected = oracle.rounded(new_scale, oracle.FP32)
    case.equal("get_scale()", scaler.get_scale(), expected)
    scaled = scaler.scale(torch.ones((), device=target.device))
    case.identical("a loss of 1, scaled", scaled, torch.tensor(expected))


@contract("AMP-SCALE-069")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=["fp32", "fp64", "fp16"])
def test_update_with_a_tensor(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    scaler = started(target, growth_factor=2.0**10, growth_interval=1)
    scaler.update(torch.tensor(1024.0, dtype=dtype, device=target.device))
    case.equal("get_scale()", scaler.get_scale(), 1024.0)
    case.equal("dtype of the scale", scale_dtype(scaler, target.device), torch.float32)
    # A scale in fp16 cannot grow to 2^20, and one in fp64 would not be rounded.
    iterate(scaler, owning(torch.ones((), device=target.device)))
    case.equal("the scale after it grew by 2^10", scaler.get_scale(), 2.0**20)
    tenth = torch.tensor(0.1, dtype=dtype)
    scaler.update(tenth.to(target.device))
    case.equal("get_scale() after update() with 0.1", scaler.get_scale(), oracle.rounded(tenth.item(), oracle.FP32))
    scaler.update(new_scale=torch.tensor(3.0, dtype=dtype, device=target.device))
    case.equal("a loss of 2, scaled", scaler.scale(torch.tensor(2.0, device=target.device)).item(), 6.0)


@contract("AMP-SCALE-070")
def test_update_keeps_a_copy(case: Case, target: Target) -> None:
    scaler = started(target)
    new_scale = torch.tensor(1024.0, device=target.device)
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    case.equal("the scale after the caller's tensor was overwritten", scaler.get_scale(), 1024.0)
    iterate(scaler, owning(torch.ones((), device=target.device)), value=math.inf)
    case.equal("the scale after a skip", scaler.get_scale(), 512.0)
    case.equal("the caller's tensor after a skip", new_scale.item(), 5.0)


@contract("AMP-SCALE-071")
def test_update_refuses_unsuited_tensors(case: Case, target: Target) -> None:
    scaler = started(target)
    unsuited = {
        "two elements": torch.ones(2, device=target.device),
        "no element": torch.ones(0, device=target.device),
        "with a gradient": torch.tensor(2.0, device=target.device, requires_grad=True),
        "elsewhere": torch.tensor(2.0, device="meta"),
    }
    for what, tensor in unsuited.items():
        case.raises(what, AssertionError, partial(scaler.update, tensor), names=("new_scale",))
    case.equal("the scale", scaler.get_scale(), 65536.0)


@contract("AMP-SCALE-072")
def test_update_with_a_scale_ends_the_iteration(case: Case, target: Target) -> None:
    scaler = started(target, growth_interval=10)
    optimizer = owning(torch.ones((), device=target.device))
    track(scaler, optimizer, "..")
    give(optimizer, math.inf)
    scaler.step(optimizer)
    scaler.update(256.0)
    case.equal("the scale, after an inf was found", scaler.get_scale(), 256.0)
    case.equal("the growth tracker", tracker(scaler), 2)
    case.equal("the next iteration, clean", track(scaler, optimizer, "."), [(256.0, 3)])


@contract("AMP-SCALE-073")
def test_update_with_a_one_element_vector(case: Case, target: Target) -> None:
    scaler = started(target)
    scaler.update(torch.tensor(1024.0, device=target.device))
    case.equal("control: a tensor of no dimension", scaler.get_scale(), 1024.0)
    scaler.update(torch.tensor([2048.0], device=target.device))
    case.equal("a tensor of one dimension and one element", scaler.get_scale(), 2048.0)


@contract("AMP-SCALE-074")
@pytest.mark.parametrize("count", [1, 2], ids=["one-optimizer", "two-optimizers"])
def test_update_with_no_sync(case: Case, target: Target, count: int) -> None:
    scaler = started(target)
    optimizers = [owning(torch.ones((), device=target.device)) for _ in range(count)]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    with OpTrace() as trace:
        scaler.update()
    case.equal("values that update() copies to the host", counts.reads(trace.ops), 0)
    expect_traced(case, trace.ops)


# Several optimizers


@contract("AMP-SCALE-112")
def test_one_count(case: Case, target: Target) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in range(3)]
    scaler = started(target, growth_interval=2)
    seen = []
    for _ in range(4):
        iterate(scaler, *optimizers)
        seen.append((scaler.get_scale(), tracker(scaler)))
    case.equal("scales and counts", seen, [(65536.0, 1), (131072.0, 0), (131072.0, 1), (262144.0, 0)])


@contract("AMP-SCALE-113")
@EACH_NON_FINITE
def test_update_forgets(case: Case, target: Target, bad: float) -> None:
    one, two = (owning(torch.ones(2, device=target.device)) for _ in range(2))
    scaler = started(target, init_scale=4.0)
    give(one, bad)
    give(two, 1.0)
    scaler.step(one)
    scaler.unscale_(two)
    scaler.update()
    give(one, 2.0)
    give(two, 2.0)
    scaler.unscale_(one)
    scaler.step(one)
    scaler.step(two)
    case.equal("calls", [len(one.calls), len(two.calls)], [1, 1])
    case.equal("gradients of the second, unscaled by 2", parameters_of(two)[0].grad.tolist(), [1.0, 1.0])
    scaler.update()
    case.equal("scale, backed off once in two iterations", (scaler.get_scale(), tracker(scaler)), (2.0, 1))


@contract("AMP-SCALE-114")
@EACH_NON_FINITE
@pytest.mark.parametrize("dirty", [0, 1])
def test_inf_seen_by_unscale(case: Case, target: Target, bad: float, dirty: int) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in range(2)]
    give(optimizers[dirty], bad)
    scaler = started(target)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.step(optimizers[1 - dirty])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)
    case.equal("growth tracker", tracker(scaler), 0)


# Many skips


@contract("AMP-SCALE-088")
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("skips", [20, 150, 200], ids=["few", "subnormal", "zero"])
def test_recovery(case: Case, target: Target, skips: int, fused: bool) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    weight = torch.nn.Parameter(torch.ones(3, device=target.device))
    if fused:
        case.require_fused(target, torch.optim.SGD)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True) if fused else torch.optim.SGD([weight], lr=0.5)
    for slope in (math.inf,) * skips + (1.0,) * 3:
        optimizer.zero_grad()
        scaler.scale((weight * slope).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    case.note("scale", scaler.get_scale())
    case.equal("parameters that are finite", weight.isfinite().tolist(), [True] * 3)
    case.at_most("largest parameter, after it moved", float(weight.max()), 0.5)
