"""Check fused and capturable steps on a GPU: synchronization, CUDA graphs, several dtypes and devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch

from ...harness.check import Case, applies, contract, needs
from ...harness.targets import Target, one_device_only, second
from ...measure.waits import raising_at_waits
from ...oracles.optimizer_state import by_step, differences, snapshot
from ...workloads.gradients import holding
from ...workloads.graphs import captured
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .optimizer_configs import OptimizerConfig, configs
from .support import demand, tracker

FUSED = tuple(kind for kind in configs(implementations=("fused",)) if kind.first and kind.scales_itself)
CAPTURABLE = tuple(
    kind
    for kind in configs(implementations=("for-loop", "foreach", "fused"))
    if kind.first and kind.accepts("capturable") and (kind.scales_itself or not kind.fused)
)


def over_optimizers(chosen: tuple[OptimizerConfig, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.id) for kind in chosen])


def build(case: Case, kind: OptimizerConfig, slopes: LinearLoss) -> torch.optim.Optimizer:
    """Return the optimizer, capturable if it can be; end the case if this device lacks it."""
    flags = {"capturable": True} if kind.accepts("capturable") else {}
    demand(case, kind, slopes.parameters[0].device)
    return kind.make(slopes.groups(), **flags)


def iterate(
    slopes: LinearLoss, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, slope: list[torch.Tensor]
) -> None:
    """Run one iteration; without a scaler one of fp32 training."""
    optimizer.zero_grad()
    loss = slopes.loss(slope)
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@contract("AMP-OPTIMIZER-090", on="cuda")
@over_optimizers(FUSED)
def test_fused_step_waits_for_nothing(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    plain = slopes.copy()
    optimizer, control = build(case, kind, slopes), build(case, kind, plain)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1024.0)
    clean = slopes.draw(rng)
    bad = with_nonfinite(clean, "last", math.inf)
    with raising_at_waits():
        for slope in (clean, bad, clean, bad):
            iterate(slopes, optimizer, scaler, slope)
        case.raises("control: get_scale synchronizes", RuntimeError, scaler.get_scale)
    for _ in range(2):
        iterate(plain, control, None, clean)
    case.equal("differences from two fp32 steps", differences(snapshot(optimizer), snapshot(control)), [])
    case.equal("scale after two skips", scaler.get_scale(), 256.0)


@contract("AMP-OPTIMIZER-091", on="cuda")
@needs("graphs")
@over_optimizers(FUSED)
def test_captured_step(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    eager = slopes.copy()
    draws = [slopes.draw(rng) for _ in range(4)]
    sequence = [
        draws[0],
        draws[1],
        with_nonfinite(draws[1], "first", math.nan),
        draws[2],
        with_nonfinite(draws[3], "last", -math.inf),
        draws[3],
    ]
    static = [part.clone() for part in draws[0]]
    optimizers = [build(case, kind, one) for one in (slopes, eager)]
    scalers = [torch.amp.GradScaler(target.device_type, init_scale=1024.0, growth_interval=2) for _ in range(2)]

    def iteration() -> None:
        scalers[0].scale(slopes.loss(static)).backward()
        scalers[0].step(optimizers[0])
        scalers[0].update()

    replay = captured(iteration, optimizers[0])
    iterate(eager, optimizers[1], scalers[1], draws[0])
    for number, slope in enumerate(sequence):
        for place, part in zip(static, slope, strict=True):
            place.copy_(part)
        replay()
        iterate(eager, optimizers[1], scalers[1], slope)
        changed = differences(snapshot(optimizers[0]), snapshot(optimizers[1]))
        case.equal(f"differences from the eager run after replay {number + 1}", changed, [])
        states = [(one.get_scale(), tracker(one)) for one in scalers]
        case.equal(f"scale and tracker after replay {number + 1}", states[0], states[1])
    start = slopes.copy()
    case.true(
        "control: the parameters moved", bool(differences(snapshot(optimizers[0]), snapshot(build(case, kind, start))))
    )


@contract("AMP-OPTIMIZER-092", on="cuda")
@over_optimizers(CAPTURABLE)
def test_capturable_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    plain = slopes.copy()
    optimizer, control = build(case, kind, slopes), build(case, kind, plain)
    scaler = torch.amp.GradScaler(target.device_type)
    clean = slopes.draw(rng)
    parameters = [one.detach().clone() for one in slopes.parameters]
    iterate(slopes, optimizer, scaler, with_nonfinite(clean, "first", math.nan))
    same = [torch.equal(now, then) for now, then in zip(slopes.parameters, parameters, strict=True)]
    case.equal("parameters that a skipped first step does not move", same, [True] * len(same))
    for number, bad in enumerate((math.inf, -math.inf)):
        iterate(slopes, optimizer, scaler, clean)
        iterate(plain, control, None, clean)
        changed = differences(snapshot(optimizer), snapshot(control))
        case.equal(f"differences from fp32 after clean step {number + 1}", changed, [])
        before = snapshot(optimizer)
        iterate(slopes, optimizer, scaler, with_nonfinite(clean, "last", bad))
        case.equal(
            f"differences after the skipped step that follows ({bad})", differences(snapshot(optimizer), before), []
        )


@contract("AMP-OPTIMIZER-093")
@over_optimizers(FUSED)
def test_several_dtypes(case: Case, target: Target, kind: OptimizerConfig) -> None:
    case.require_arithmetic(target, torch.float64)
    demand(case, kind, target.device)
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64)
    places = [(target.device, dtype) for dtype in dtypes]
    decides_once(case, target, kind, places, ((), *((place,) for place in range(4))))


@contract("AMP-OPTIMIZER-069", on="accelerator")
@applies(one_device_only)
@pytest.mark.parametrize("bad_indices", [(), (0,), (2,), (0, 2)], ids=["clean", "first", "second", "both"])
@over_optimizers(FUSED)
def test_two_devices(case: Case, target: Target, kind: OptimizerConfig, bad_indices: tuple[int, ...]) -> None:
    demand(case, kind, target.device)
    other = second(target)
    places = [(device, torch.float32) for device in (target.device, target.device, other, other)]
    decides_once(case, target, kind, places, (bad_indices,))


RATE = 2.0**-4
# A fused optimizer takes a rate on a device to every device; the others read it where it is.
RATES = [
    pytest.param(kind, place, id=f"{kind.id}-{place}")
    for kind in configs(implementations=("for-loop", "foreach", "fused"))
    if kind.first and kind.accepts("lr") and kind.gradients == "dense"
    for place in (("cpu", "first", "second") if kind.fused else ("cpu",))
]


@contract("AMP-OPTIMIZER-125", on="accelerator")
@applies(one_device_only)
@pytest.mark.parametrize(("kind", "place"), RATES)
def test_rate_in_a_tensor_on_two_devices(case: Case, target: Target, kind: OptimizerConfig, place: str) -> None:
    case.require_arithmetic(target, torch.float64)
    demand(case, kind, target.device)
    other = second(target)
    # The parts of other implementations than fused ones compute with a rate in a tensor in float32, not in float64.
    dtypes = (torch.float32, torch.float64) if kind.fused else (torch.float32,)
    places = [(device, dtype) for dtype in dtypes for device in (target.device, other)]
    where = {"cpu": torch.device("cpu"), "first": target.device, "second": other}[place]
    flags = {"capturable": True} if kind.accepts("capturable") and not kind.fused else {}
    given = [torch.tensor([0.5, -1.25, 2.0 + n], dtype=dtype, device=one) for n, (one, dtype) in enumerate(places)]
    parameters, plain = holding(given), holding(given)
    try:
        optimizer = kind.make(parameters, lr=torch.tensor(RATE, device=where), **flags)
    except ValueError as error:
        case.unsupported(f"{kind.id} refuses a learning rate in a tensor: {error}")
        raise
    control = kind.make(plain, lr=RATE, **flags)
    scalers = [torch.amp.GradScaler(target.device_type, init_scale=1024.0) for _ in range(2)]
    for number, bad in enumerate((False, True, False)):
        for scaler, owners, one in zip(scalers, (parameters, plain), (optimizer, control), strict=True):
            scale = scaler.scale(torch.ones((), device=target.device)).item()
            for at, (owner, gradient) in enumerate(zip(owners, given, strict=True)):
                # On one device: what a flag of two does is AMP-OPTIMIZER-069.
                owner.grad = gradient * (math.inf if bad and at == 0 else scale)
            step(scaler, one)
        pairs = [(ours.detach(), theirs.detach()) for ours, theirs in zip(parameters, plain, strict=True)]
        unlike = [str(places[at]) for at, pair in enumerate(pairs) if not torch.equal(*pair)]
        what = f"step {number}{', which overflows' if bad else ''}"
        case.equal(f"{what}: parameters unlike those of the rate in a number", unlike, [])
        case.equal(f"{what}: loss scales", *(scaler.get_scale() for scaler in scalers))
    moved = [not torch.equal(one.detach(), start) for one, start in zip(plain, given, strict=True)]
    case.equal("parameters that the steps move (control)", moved, [True] * len(moved))


def decides_once(
    case: Case,
    target: Target,
    kind: OptimizerConfig,
    places: Sequence[tuple[torch.device, torch.dtype]],
    spoils: Iterable[tuple[int, ...]],
) -> None:
    """Check a clean step on gradients of these devices and dtypes, then a step in which some of them hold inf."""

    def gradients(bad_indices: tuple[int, ...]) -> list[torch.Tensor]:
        made = [
            torch.tensor([0.5, -1.25, 2.0 + n], dtype=dtype, device=device) for n, (device, dtype) in enumerate(places)
        ]
        for number in bad_indices:
            made[number][1] = math.inf
        return made

    for bad_indices in spoils:
        parameters, plain = holding(gradients(())), holding(gradients(()))
        optimizer, control = kind.make(parameters), kind.make(plain)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=1024.0)
        scaler.scale(torch.ones((), device=target.device))
        # A clean step first, so that a skip could change optimizer state.
        for scale, owners in ((1024.0, parameters), (1.0, plain)):
            for owner, gradient in zip(owners, gradients(()), strict=True):
                owner.grad = gradient * scale
        step(scaler, optimizer)
        control.step()
        case.equal("differences from fp32 after a clean step", differences(snapshot(optimizer), snapshot(control)), [])
        if not bad_indices:
            continue
        for owner, gradient in zip(parameters, gradients(bad_indices), strict=True):
            owner.grad = gradient * 1024.0
        before = snapshot(optimizer)
        step(scaler, optimizer)
        what = f"after a step with inf in gradient {' and '.join(f'{n}, {places[n]}' for n in bad_indices)}"
        steps, others = (differences(*pair) for pair in zip(by_step(snapshot(optimizer)), by_step(before), strict=True))
        case.equal(f"differences {what}", others, [])
        case.equal(f"step counters that changed {what}", steps, [])
        case.equal("scale afterwards", scaler.get_scale(), 512.0)


def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()
