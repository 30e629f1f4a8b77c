"""Check the casts, host-device synchronizations and operations that AMP adds, by counting, on every device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target, device_module
from ...oracles.symbolic.blocks import blocks, execute, predict_casts, tensors
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...workloads.mlp import mlp
from ...workloads.training import train_step
from .clocks import EventClock, Work

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = blocks()
EVERYWHERE = ("linear", "mse", "conv", "tied", "frozen")
# Where tensors of two types meet, autograd by itself casts a gradient back: no cast of autocast's.
MIXED = ("op-mul", "op-add", "transformer", "language", "lstm")
TIED = [name for name in BLOCKS if name.startswith("tied-")]
TRIES = 8  # of a host that may be busy itself; the clock's delay grows from one to the next


def _counted(
    target: Target, block: str, dtype: torch.dtype | None, rng: torch.Generator, *, cache: bool = True
) -> tuple[OpTrace, OpTrace]:
    """Operations of a block's forward pass, in a region of `dtype` (None: outside any), and of its backward pass."""
    leaves = tensors(BLOCKS[block], target.device, rng)
    region = nullcontext() if dtype is None else target.autocast(dtype, cache_enabled=cache)
    with OpTrace() as forward, region:
        result = execute(BLOCKS[block], leaves)
    seed = torch.ones_like(result)
    with OpTrace() as backward:
        result.backward(seed)
    return forward, backward


def _judge_casts(case: Case, target: Target, block: str, dtype: torch.dtype, rng: torch.Generator, cache: bool) -> None:
    forward, backward = _counted(target, block, dtype, rng, cache=cache)
    predicted = predict_casts(BLOCKS[block], target.device_type, dtype, cache=cache)
    case.equal("casts forward and backward", [counts.casts(forward.ops), counts.casts(backward.ops)], list(predicted))


@contract("AMP-SPEED-008")
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("block", [*EVERYWHERE, *TIED])
def test_casts_follow_the_policy(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str, cache: bool
) -> None:
    _judge_casts(case, target, block, amp_dtype, rng, cache)


# Apart, because a GPU's kernels differ by type, and CUDA's softmax reads 16 bit and writes fp32 at once.
@contract("AMP-SPEED-008", on="cpu")
@pytest.mark.parametrize("block", [name for name in BLOCKS if name not in {*EVERYWHERE, *TIED, *MIXED}])
def test_casts_on_the_cpu_follow_the_policy(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    _judge_casts(case, target, block, amp_dtype, rng, cache=True)


@contract("AMP-SPEED-009")
@pytest.mark.parametrize("clip", [None, 1.0], ids=["plain", "unscaled-and-clipped"])
def test_the_host_waits_once_a_step(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, clip: float | None
) -> None:
    work = mlp(target.device, rng)
    # SGD: Adam counts its steps in tensors and reads them on the CPU. A fused one needs no look at the flag.
    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.1, fused=False)
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
    reads, calls = {}, {}
    stages: dict[str, Work] = {
        "forward": forward,
        "scale and backward": lambda: scaler.scale(loss[0]).backward(),
        "unscale_ and clip": unscale,
        "step": lambda: scaler.step(optimizer),
        "update": lambda: scaler.update(),
    }
    for name, stage in stages.items():
        with OpTrace() as seen, counts.HostReads() as host_reads:
            stage()
        reads[name] = counts.reads(seen.ops)
        calls[name] = sum(host_reads.counts.values())
    case.equal("device-to-host copies by stage", reads, {name: int(name == "step") for name in stages})
    case.equal("calls that copy a value to the host, by stage", calls, {name: int(name == "step") for name in stages})


def _runs_ahead(target: Target, work: Work) -> bool:
    """Return whether the host can queue all of `work` while the device is still busy with earlier work."""
    clock = EventClock(device_module(target.device_type))
    for _ in range(TRIES):
        clock.seconds(work)
        if clock.hidden:
            return True
    return False


@contract("AMP-SPEED-009", on="accelerator")
def test_the_host_runs_ahead(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    # A count of operations does not see synchronizations without a copy, such as torch.cuda.synchronize.
    if not callable(getattr(device_module(target.device_type), "_sleep", None)):
        case.unsupported(f"torch has no API to keep a {target.device_type} device busy (`_sleep`)")
    inputs, *weights = (torch.randn(64, 64, generator=rng).to(target.device).requires_grad_() for _ in range(3))
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler(target.device_type)

    def step(dtype: torch.dtype | None) -> None:
        with nullcontext() if dtype is None else target.autocast(dtype):
            result = torch.nn.functional.linear(torch.nn.functional.linear(inputs, weights[0]).relu(), weights[1])
        if dtype is None:
            result.sum().backward()
            return
        # All of a scaler's work but step, which synchronizes for the overflow check.
        scaler.scale(result.float().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update()

    if not _runs_ahead(target, lambda: step(None)):
        case.untestable("the host does not run ahead of this device in fp32 either")
    case.equal("the host runs ahead in a region as in fp32", _runs_ahead(target, lambda: step(amp_dtype)), True)


def _judge_work(case: Case, target: Target, block: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    full, low = (_counted(target, block, arm, rng) for arm in (None, dtype))
    for name, fp32, amp in zip(("forward", "backward"), full, low, strict=True):
        case.equal(f"operations, {name}", counts.work(amp.ops), counts.work(fp32.ops))


ALIKE = ("mlp", "mse", "conv", "attention", "tied")


@contract("AMP-SPEED-010")
@pytest.mark.parametrize("block", ALIKE)
def test_the_work_is_that_of_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    _judge_work(case, target, block, amp_dtype, rng)


# Apart, because a GPU has kernels of attention and of normalizations for 16 bit alone. The gradient of baddbmm's first
# argument is an expanded view, which an fp32 leaf takes by a copy and a 16-bit one by the cast.
@contract("AMP-SPEED-010", on="cpu")
@pytest.mark.parametrize("block", [name for name in BLOCKS if name not in {*ALIKE, "op-baddbmm"}])
def test_the_work_on_the_cpu_is_that_of_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    _judge_work(case, target, block, amp_dtype, rng)
