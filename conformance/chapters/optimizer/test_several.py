"""Check that several optimizers on one scaler skip independently."""

from __future__ import annotations

import math

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from ...workloads.gradients import NON_FINITE
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.third_party_optimizers import (
    give,
    owning,
    parameters_of,
)
from .optimizer_configs import OptimizerConfig
from .support import BOTH, BY_ROUTE, FUSED, PLAIN, ROUTES, iterate, kind_of, only, started, tracker, twins


@contract("AMP-OPTIMIZER-050")
@pytest.mark.parametrize("dirty", [(0,), (2,), *(deep("standard", d) for d in ((), (1,), (0, 2), (0, 1, 2)))], ids=str)
def test_each_optimizer_decides_alone(case: Case, target: Target, rng: torch.Generator, dirty: tuple[int, ...]) -> None:
    chosen = [PLAIN, FUSED if FUSED.promised_on(target.device_type) else PLAIN, kind_of("Adagrad", "for-loop")]
    for explicit in ROUTES:
        slopes = [LinearLoss.make("dense", target.device, rng) for _ in chosen]
        twins = [workload.copy() for workload in slopes]
        optimizers = [kind.make(workload.groups()) for kind, workload in zip(chosen, slopes, strict=True)]
        plains = [kind.make(workload.groups()) for kind, workload in zip(chosen, twins, strict=True)]
        scaler = torch.amp.GradScaler(target.device_type)
        clean = [workload.draw(rng) for workload in slopes]
        for workload, slope, optimizer in zip(twins, clean, plains, strict=True):
            iterate(optimizer, workload.loss(slope))
        for number, workload in enumerate(slopes):
            slope = with_nonfinite(clean[number], "last", math.inf) if number in dirty else clean[number]
            scaler.scale(workload.loss(slope)).backward()
        before = [snapshot(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            if explicit:
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for number, (optimizer, plain) in enumerate(zip(optimizers, plains, strict=True)):
            if number in dirty:
                seen, expected = only("parameter/", snapshot(optimizer)), only("parameter/", before[number])
            else:
                seen, expected = snapshot(optimizer), snapshot(plain)
            verb = "skips" if number in dirty else "steps"
            case.equal(f"optimizer {number} {verb}; differences", differences(seen, expected), [])
        case.equal("scale after the one update()", scaler.get_scale(), 2.0 ** (15 if dirty else 16))


@contract("AMP-OPTIMIZER-051")
@BOTH
def test_foreign_inf_is_ignored(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes, twin, optimizer, plain = twins(case, target, rng, kind)
    other = torch.nn.Parameter(torch.ones(3, device=target.device))
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    iterate(optimizer, slopes.loss(slope) + (other * math.inf).sum(), scaler)
    iterate(plain, twin.loss(slope))
    case.equal("differences from fp32", differences(snapshot(optimizer), snapshot(plain)), [])
    case.equal("gradient of the parameter that no optimizer owns", other.grad.tolist(), [math.inf] * 3)
    case.equal("scale", scaler.get_scale(), 65536.0)


BY_BAD = pytest.mark.parametrize("bad", NON_FINITE.values(), ids=list(NON_FINITE))


@contract("AMP-OPTIMIZER-050")
@BY_BAD
@pytest.mark.parametrize("dirty", [0, 1, 2])
@BY_ROUTE
def test_only_the_bad_optimizer_skips(case: Case, target: Target, bad: float, dirty: int, explicit: bool) -> None:
    optimizers = [owning(torch.full((2,), 65536.0, device=target.device)) for _ in range(3)]
    parameters_of(optimizers[dirty])[0].grad[1] = bad
    scaler = started(target)
    if explicit:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    case.equal("calls", [len(optimizer.calls) for optimizer in optimizers], [int(i != dirty) for i in range(3)])
    seen = [parameters_of(optimizer)[0].tolist() for optimizer in optimizers]
    case.equal("parameters", seen, [[0.0, 0.0] if i == dirty else [-1.0, -1.0] for i in range(3)])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)


@contract("AMP-OPTIMIZER-050")
@pytest.mark.parametrize("dirty", ["!.", ".!", "!!", "!!!"], ids=["first", "second", "both", "three"])
def test_one_backoff(case: Case, target: Target, dirty: str) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in dirty]
    scaler = started(target, growth_interval=4)
    for optimizer in optimizers:
        give(optimizer, 1.0)
        scaler.step(optimizer)
    scaler.update()
    for optimizer, letter in zip(optimizers, dirty, strict=True):
        give(optimizer, math.inf if letter == "!" else 1.0)
        scaler.step(optimizer)
    case.equal("scale before update()", scaler.get_scale(), 65536.0)
    scaler.update()
    case.equal("scale after update()", scaler.get_scale(), 32768.0)
    case.equal("growth tracker", tracker(scaler), 0)


ATTEMPTS = 100  # to get the id() of a freed optimizer again; nearly every one succeeds


@contract("AMP-OPTIMIZER-053")
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_new_optimizer_in_the_place_of_another(case: Case, target: Target, call: str) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=8.0)
    scaler.scale(torch.ones((), device=target.device))

    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(2, device=target.device))
        parameter.grad = torch.full_like(parameter, 8.0)
        return parameter, torch.optim.SGD([parameter], lr=0.25)

    _, kept = made()
    getattr(scaler, call)(kept)
    parameter, optimizer = made()
    scaler.step(optimizer)
    case.equal("control: parameters after the step of a second optimizer", parameter.tolist(), [0.75, 0.75])
    for attempt in range(ATTEMPTS):
        scaler.update(8.0)
        _, freed = made()
        getattr(scaler, call)(freed)
        place = id(freed)
        del freed
        parameter, optimizer = made()
        if id(optimizer) == place:
            case.note("attempts until an id() was reused", attempt + 1)
            break
    else:
        case.untestable(f"could not reproduce id() reuse in {ATTEMPTS} attempts")
    raised = ""
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        raised = str(error)
    case.equal("exception of the new optimizer's step", raised, "")
    case.equal("parameters after it", parameter.tolist(), [0.75, 0.75])
