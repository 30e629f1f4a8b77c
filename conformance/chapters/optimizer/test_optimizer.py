"""Optimizers: what a scaled step, a skipped step and an unscaled step do to every optimizer of torch.optim."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.optimizer_state import departures, gradients, on_host, snapshot
from ...workloads.linear_loss import Slopes, spoilt
from ...workloads.third_party_optimizers import Ordinary, SelfScaling
from .float64_updates import UPDATES, steps
from .optimizer_configs import Kind, kinds, listed, present, reached, takes_closure

U = 2.0**-24
NON_FINITE = {"inf": math.inf, "minus-inf": -math.inf, "nan": math.nan}
ALL = tuple(kinds(implementations=("for-loop", "foreach", "fused", "default")))
PLAIN = next(kind for kind in ALL if (kind.optimizer, kind.implementation) == ("SGD", "for-loop"))
FUSED = next(kind for kind in ALL if (kind.optimizer, kind.implementation) == ("Adam", "fused"))
ROUTES = (False, True)  # whether unscale_() is called before step()


def each(
    chosen: Callable[[Kind], bool] = lambda kind: True,
    *,
    quick: tuple[str, ...] = ("SGD", "Adam"),
    variants: str | None = "full",
    fused: str | None = None,
) -> pytest.MarkDecorator:
    """Every optimizer that fits, in its first variant, those of `quick` (all, if empty) at every level; the other
    variants, and the implementation that torch chooses by itself, from the level `variants` on (`fused`: of fused
    ones from that level)."""
    parameters = []
    for kind in filter(chosen, ALL):
        if kind.first and kind.implementation != "default":
            shallow = not quick or kind.optimizer in quick
            parameters.append(pytest.param(kind, id=kind.id) if shallow else deep("standard", kind, id=kind.id))
        elif variants:
            parameters.append(deep(fused if fused and kind.fused else variants, kind, id=kind.id))
    return pytest.mark.parametrize("kind", parameters)


BAD = pytest.mark.parametrize(
    "bad",
    [pytest.param(math.inf, id="inf"), deep("standard", math.nan, id="nan"), deep("full", -math.inf, id="minus-inf")],
)
BOTH = pytest.mark.parametrize("kind", [PLAIN, FUSED], ids=["for-loop", "fused"])


def build(case: Case, kind: Kind, slopes: Slopes, **changes: Any) -> torch.optim.Optimizer:
    """The optimizer over the workload's parameters, or the verdict that this device (or the suite) lacks it."""
    device = slopes.parameters[0].device
    if not kind.promised_on(device.type):
        trial = slopes.copy()
        try:
            iterate(kind.make(trial.groups(), **changes), trial.loss(trial.draw(torch.Generator())))
        except Exception as error:
            if not kind.listed:
                case.untestable(f"torch.optim.{kind.optimizer} is new and its default step needs more: {error}")
            case.unsupported(f"no {kind.implementation} {kind.optimizer} on {device.type}: {error}")
    return kind.make(slopes.groups(), **changes)


def iterate(
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    scaler: torch.amp.GradScaler | None = None,
    *,
    explicit: bool = False,
) -> Any:
    """One iteration, with or without a scaler; returns what the step returned."""
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        return optimizer.step()
    scaler.scale(loss).backward()
    if explicit:
        scaler.unscale_(optimizer)
    answer = scaler.step(optimizer)
    scaler.update()
    return answer


@contextlib.contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Have torch.empty return NaNs, so that state which nobody set cannot pass for zeros by chance."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def only(place: str, whole: dict[str, Any]) -> dict[str, Any]:
    """The part of a snapshot whose places begin with `place`."""
    return {key: value for key, value in whole.items() if key.startswith(place)}


def unmoved(slopes: Slopes, before: Iterable[torch.Tensor]) -> list[int]:
    """Which moving parameters have no element that differs from the copies."""
    return [i for i, (now, then) in enumerate(zip(slopes.moving, before, strict=False)) if torch.equal(now, then)]


def clones(slopes: Slopes) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in slopes.moving]


# The table of optimizers


@contract("AMP-OPTIMIZER-001")
def test_every_optimizer_is_known(case: Case) -> None:
    found = present()
    due = [name for name, since in listed().items() if reached(since)]
    case.equal("optimizers of the table that torch.optim lacks", [name for name in due if name not in found], [])
    case.note("optimizers tried with default arguments, not in the table", [n for n in found if n not in listed()])
    case.at_least("optimizers found", len(found), len(due))


# A skipped step


@contract("AMP-OPTIMIZER-010")
@each()
@BAD
def test_skip_keeps_parameters(case: Case, target: Target, rng: torch.Generator, kind: Kind, bad: float) -> None:
    for explicit in ROUTES:
        for place in ("first", "last"):
            slopes = Slopes.make(kind.gradients, target.device, rng)
            optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
            before, clean = only("parameter/", snapshot(optimizer)), slopes.draw(rng)
            iterate(optimizer, slopes.loss(spoilt(clean, place, bad)), scaler, explicit=explicit)
            route = f"bad value {place}, {'unscale_ first' if explicit else 'step alone'}"
            changed = departures(only("parameter/", snapshot(optimizer)), before)
            case.equal(f"parameters that the skipped first step changed ({route})", changed, [])
    copies = clones(slopes)
    iterate(optimizer, slopes.loss(clean), scaler)
    case.equal("control: parameters that a clean step leaves as they were", unmoved(slopes, copies), [])


@contract("AMP-OPTIMIZER-011")
@each(quick=())
@BAD
def test_skip_keeps_state(case: Case, target: Target, rng: torch.Generator, kind: Kind, bad: float) -> None:
    for explicit in ROUTES:
        for place in ("first", "last"):
            slopes = Slopes.make(kind.gradients, target.device, rng)
            optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
            start = snapshot(optimizer)
            clean = slopes.draw(rng)
            iterate(optimizer, slopes.loss(clean), scaler)
            before = snapshot(optimizer)
            iterate(optimizer, slopes.loss(spoilt(slopes.draw(rng), place, bad)), scaler, explicit=explicit)
            route = f"bad value {place}, {'unscale_ first' if explicit else 'step alone'}"
            changed = departures(snapshot(optimizer), before)
            case.equal(f"parameters and state that the skipped step changed ({route})", changed, [])
    case.true("control: the good step before it changed something", bool(departures(before, start)))


@contract("AMP-OPTIMIZER-012")
@each(lambda kind: kind.accepts("weight_decay") and kind.first)
def test_skip_applies_no_weight_decay(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer = build(case, kind, slopes, weight_decay=0.125)
    scaler = torch.amp.GradScaler(target.device_type)
    nothing = [torch.zeros_like(slope) for slope in slopes.draw(rng)]
    for bad in NON_FINITE.values():
        copies = only("parameter/", snapshot(optimizer))
        iterate(optimizer, slopes.loss(spoilt(nothing, "last", bad)), scaler)
        changed = departures(only("parameter/", snapshot(optimizer)), copies)
        case.equal(f"parameters that decayed in a step skipped for {bad}", changed, [])
    before = clones(slopes)
    for _ in range(2):  # one step may only start the averages
        iterate(optimizer, slopes.loss(nothing), scaler)
    case.equal("control: parameters that a clean step with zero gradients does not decay", unmoved(slopes, before), [])


@contract("AMP-OPTIMIZER-013")
@each(lambda kind: not kind.fused, variants=None)
def test_skipped_first_step_makes_no_state(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    before = snapshot(optimizer)  # Adagrad has its state from the start
    iterate(optimizer, slopes.loss(spoilt(slopes.draw(rng), "last", math.inf)), scaler)
    case.equal("state after a skipped first step, against before it", departures(snapshot(optimizer), before), [])


@contract("AMP-OPTIMIZER-014")
@each(lambda kind: kind.fused, variants=None)
def test_skipped_first_step_of_fused(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    before = snapshot(optimizer)
    iterate(optimizer, slopes.loss(spoilt(slopes.draw(rng), "last", math.inf)), scaler)
    new = [key for key in only("state/", snapshot(optimizer)) if key not in before]
    case.note("entries of state that a skipped first step made", new)


@contract("AMP-OPTIMIZER-020")
@each()
def test_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    for explicit in ROUTES:
        first = Slopes.make(kind.gradients, target.device, rng)
        second = first.copy()
        skipping, straight = build(case, kind, first), build(case, kind, second)
        scalers = [torch.amp.GradScaler(target.device_type) for _ in range(2)]
        clean = [first.draw(rng) for _ in range(3)]
        for number, slope in enumerate(clean):
            for bad, place in zip(list(NON_FINITE.values())[:number], ("last", "first"), strict=False):
                iterate(skipping, first.loss(spoilt(first.draw(rng), place, bad)), scalers[0], explicit=explicit)
            iterate(skipping, first.loss(slope), scalers[0], explicit=explicit)
            iterate(straight, second.loss(slope), scalers[1], explicit=explicit)
            seen = {**snapshot(skipping), **gradients(first.parameters)}
            expected = {**snapshot(straight), **gradients(second.parameters)}
            what = f"what differs from a run without inf after step {number + 1}"
            case.equal(f"{what} ({'unscale_ first' if explicit else 'step alone'})", departures(seen, expected), [])
    case.equal("scale after three skips", scalers[0].get_scale(), 2.0**13)


@contract("AMP-OPTIMIZER-020", on="accelerator")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.id) for kind in ALL if kind.first and kind.accepts("capturable")]
)
def test_capturable_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    first = Slopes.make(kind.gradients, target.device, rng)
    second = first.copy()
    skipping, straight = build(case, kind, first, capturable=True), build(case, kind, second, capturable=True)
    scaler = torch.amp.GradScaler(target.device_type)
    for number in range(3):
        slope = first.draw(rng)
        iterate(skipping, first.loss(spoilt(slope, "last", math.inf)), scaler)
        iterate(skipping, first.loss(slope), scaler)
        iterate(straight, second.loss(slope))
        changed = departures(snapshot(skipping), snapshot(straight))
        case.equal(f"what differs from a run without inf after step {number + 1}", changed, [])


@contract("AMP-OPTIMIZER-021")
@each(quick=("SGD",))
def test_first_step_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    first = Slopes.make(kind.gradients, target.device, rng)
    second = first.copy()
    skipping, straight = build(case, kind, first), build(case, kind, second)
    scaler = torch.amp.GradScaler(target.device_type)
    slope = first.draw(rng)
    with uninitialised_memory_is_nan():
        for bad in NON_FINITE.values():
            iterate(skipping, first.loss(spoilt(slope, "last", bad)), scaler)
        for _ in range(2):
            iterate(skipping, first.loss(slope), scaler)
            iterate(straight, second.loss(slope))
    changed = departures(snapshot(skipping), snapshot(straight))
    case.equal("what differs from a run without inf after two steps", changed, [])


# A clean step


@contract("AMP-OPTIMIZER-030")
@each(quick=())
@pytest.mark.parametrize("exponent", [16, *(deep("full", k) for k in (0, -8, 60))])
def test_scaled_step_equals_unscaled(
    case: Case, target: Target, rng: torch.Generator, kind: Kind, exponent: int
) -> None:
    for explicit in ROUTES:
        first = Slopes.make(kind.gradients, target.device, rng)
        second = first.copy()
        scaled, plain = build(case, kind, first), build(case, kind, second)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
        start = clones(first)
        for number in range(3):
            slope = first.draw(rng)
            iterate(scaled, first.loss(slope), scaler, explicit=explicit)
            iterate(plain, second.loss(slope))
            seen = {**snapshot(scaled), **gradients(first.parameters)}
            expected = {**snapshot(plain), **gradients(second.parameters)}
            what = f"what differs from fp32 after step {number + 1}"
            case.equal(f"{what} ({'unscale_ first' if explicit else 'step alone'})", departures(seen, expected), [])
    case.equal("control: parameters that did not move", unmoved(first, start), [])


@contract("AMP-OPTIMIZER-031")
@each(variants=None)
def test_gradients_end_unscaled(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make(kind.gradients, target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        slope = slopes.draw(rng)
        expected = torch.autograd.grad(slopes.loss(slope), slopes.moving)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        for number, (parameter, gradient) in enumerate(zip(slopes.moving, expected, strict=True)):
            case.identical(f"gradient {number} after step(), against the loss's own slope", parameter.grad, gradient)


@contract("AMP-OPTIMIZER-032")
@each(lambda kind: kind.optimizer in UPDATES and kind.gradients == "dense")
def test_step_equals_written_algorithm(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    """The bound: each of three steps rounds the parameter at most four times, relative to its own size, and its change
    in at most 16 operations; 1 - beta^t, in fp32 in some kernels, multiplies their rounding by 1 / (1 - beta)."""
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    start = [parameter.flatten().tolist() for parameter in clones(slopes)]
    drawn = [slopes.draw(rng, positive=True) for _ in range(3)]
    skipped = spoilt(drawn[0], "last", math.inf)
    for slope in (drawn[0], skipped, *drawn[1:]):
        iterate(optimizer, slopes.loss(slope), scaler)
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.9, 0.999) if "Adam" in kind.optimizer else (0.0,))))
    worst = 0.0
    for number, parameter in enumerate(slopes.moving):
        histories = zip(*(slope[number].flatten().tolist() for slope in drawn), strict=True)
        for seen, began, history in zip(parameter.flatten().tolist(), start[number], histories, strict=True):
            path = [began, *steps(kind.optimizer, began, history, kind.arguments)]
            travelled = sum(abs(b - a) for a, b in itertools.pairwise(path))
            bound = 3 * U * (4 * max(map(abs, path)) + 16 * amplified * travelled)
            worst = max(worst, abs(seen - path[-1]) / bound)
    case.at_most("largest error of a parameter after three steps", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-033")
@each(lambda kind: kind.accepts("foreach") and kind.first)
def test_implementations_agree(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    """The bound: as for the written algorithm, with up to 32 operations and sums over at most 13 elements a step."""
    slopes = Slopes.make(kind.gradients, target.device, rng)
    reference = Slopes(tuple(torch.nn.Parameter(p.detach().cpu().double()) for p in slopes.parameters), "dense")
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    twin = next(one for one in ALL if (one.optimizer, one.implementation) == (kind.optimizer, "for-loop"))
    exact = twin.make(reference.groups())
    start = clones(reference)
    travelled = [torch.zeros_like(parameter) for parameter in start]
    for _ in range(3):
        slope = slopes.draw(rng, positive=True)
        iterate(optimizer, slopes.loss(slope), scaler)
        before = clones(reference)
        iterate(exact, reference.loss([part.cpu().double() for part in slope]))
        for way, now, then in zip(travelled, reference.moving, before, strict=True):
            way += (now.detach() - then).abs()
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.0,))))
    worst = 0.0
    for seen, right, began, way in zip(slopes.moving, reference.moving, start, travelled, strict=True):
        bound = 3 * U * (4 * (began.abs() + way) + (32 + 13) * amplified * way)
        worst = max(worst, float(((seen.detach().cpu().double() - right.detach()).abs() / bound).max()))
    case.at_most("largest distance of a parameter from a float64 run of the for-loop", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-034")
@each(lambda kind: kind.gradients != "sparse", variants=None)
def test_master_weights_and_state_are_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: Kind
) -> None:
    layer = torch.nn.Linear(8, 4, bias=kind.gradients == "dense").to(target.device)
    trial = Slopes.make(kind.gradients, target.device, rng)
    build(case, kind, trial)
    optimizer, scaler = kind.make(layer.parameters()), torch.amp.GradScaler(target.device_type, init_scale=256.0)
    inputs = torch.randn(6, 8, generator=rng).to(target.device)
    for _ in range(2):
        with target.autocast(amp_dtype):
            outputs = layer(inputs)
            loss = outputs.float().square().mean()
        iterate(optimizer, loss, scaler)
    case.equal("control: dtype of the layer's output", outputs.dtype, amp_dtype)
    dtypes = {
        "parameter": {p.dtype for p in layer.parameters()},
        "gradient": {p.grad.dtype for p in layer.parameters()},
    }
    dtypes["state"] = {
        value.dtype
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    } | {torch.float32}
    for name, seen in dtypes.items():
        case.equal(f"dtypes of every {name}", sorted(map(str, seen)), ["torch.float32"])
    case.equal("scale after two clean steps", scaler.get_scale(), 256.0)


@contract("AMP-OPTIMIZER-035")
@each(variants=None)
def test_parameter_groups_and_missing_gradients(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    alone = slopes.copy()
    build(case, kind, slopes.copy())
    rates = (0.25, 0.0625)
    groups = [{**group, "lr": rate} for group, rate in zip(slopes.groups(), rates, strict=True)]
    parts = [
        kind.make(group["params"], lr=rate)  # type: ignore[arg-type]
        for group, rate in zip(alone.groups(), rates, strict=True)
    ]
    optimizer, scaler = kind.make(groups), torch.amp.GradScaler(target.device_type)
    for _ in range(2):
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(slope), scaler)
        alone.loss(slope).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    for number, (seen, expected) in enumerate(zip(slopes.parameters, alone.parameters, strict=True)):
        case.identical(f"parameter {number}, against its group's own fp32 optimizer", seen, expected)
    still = slopes.parameters[-1]
    case.equal("gradient of the parameter that the loss does not use", still.grad, None)
    made = {} if still not in optimizer.state else dict(optimizer.state[still])
    moved = {} if alone.parameters[-1] not in parts[1].state else dict(parts[1].state[alone.parameters[-1]])
    case.equal("entries of state for it, against fp32", sorted(made), sorted(moved))


@contract("AMP-OPTIMIZER-036")
@BOTH
def test_added_parameter_group(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make("dense", target.device, rng)
    build(case, kind, slopes.copy())
    twin = slopes.copy()
    optimizer, plain = (kind.make(list(workload.parameters[:2])) for workload in (slopes, twin))
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    for number in range(2):
        iterate(optimizer, slopes.loss(slope), scaler)
        iterate(plain, twin.loss(slope))
        if number == 0:
            optimizer.add_param_group({"params": list(slopes.parameters[2:])})
            plain.add_param_group({"params": list(twin.parameters[2:])})
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(plain)), [])
    before = snapshot(optimizer)
    iterate(optimizer, slopes.loss(spoilt(slope, "last", math.nan)), scaler)
    case.equal("what NaN in the added group lets change", departures(snapshot(optimizer), before), [])


@contract("AMP-OPTIMIZER-037")
@each(variants=None)
def test_disabled_scaler(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    first = Slopes.make(kind.gradients, target.device, rng)
    second = first.copy()
    disabled, plain = build(case, kind, first), build(case, kind, second)
    scaler = torch.amp.GradScaler(target.device_type, enabled=False)
    for _ in range(2):
        slope = first.draw(rng)
        iterate(disabled, first.loss(slope), scaler, explicit=True)
        iterate(plain, second.loss(slope))
    case.equal("what differs from fp32", departures(snapshot(disabled), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-038")
@each()
def test_resumed_from_checkpoint(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    clean = slopes.draw(rng)
    iterate(optimizer, slopes.loss(clean), scaler)
    iterate(optimizer, slopes.loss(spoilt(clean, "first", math.nan)), scaler)
    saved = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
    resumed = slopes.copy()
    again, scaler_again = build(case, kind, resumed), torch.amp.GradScaler(target.device_type)
    again.load_state_dict(saved[0])
    scaler_again.load_state_dict(saved[1])
    for slope in (slopes.draw(rng), spoilt(clean, "last", math.inf), slopes.draw(rng)):
        iterate(optimizer, slopes.loss(slope), scaler)
        iterate(again, resumed.loss(slope), scaler_again)
    # load_state_dict moves the numbers of the state, but for `step`, to the parameter's device
    # (_process_value_according_to_param_policy in torch/optim/optimizer.py); NAdam makes its mu_product on the CPU.
    seen, expected = on_host(snapshot(again)), on_host(snapshot(optimizer))
    case.equal("what differs from the run that went on", departures(seen, expected), [])
    case.equal("state of the resumed scaler", scaler_again.state_dict(), scaler.state_dict())


# What step() returns and passes on


@contract("AMP-OPTIMIZER-040")
@pytest.mark.parametrize("maker", [Ordinary, SelfScaling], ids=["ordinary", "self-scaling"])
def test_return_value(case: Case, target: Target, rng: torch.Generator, maker: Callable[[Any], Ordinary]) -> None:
    for explicit in ROUTES:
        for answer in (None, 0.0, "a value", torch.ones(2)):
            slopes = Slopes.make("dense", target.device, rng)
            optimizer, scaler = maker(slopes.groups()), torch.amp.GradScaler(target.device_type)
            optimizer.answer = answer
            seen = iterate(optimizer, slopes.loss(slopes.draw(rng)), scaler, explicit=explicit)
            case.true("step() returns the very object that optimizer.step() returned", seen is answer, seen)


@contract("AMP-OPTIMIZER-041")
@BAD
def test_skip_returns_none(case: Case, target: Target, rng: torch.Generator, bad: float) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make("dense", target.device, rng)
        optimizer, scaler = Ordinary(slopes.groups()), torch.amp.GradScaler(target.device_type)
        optimizer.answer = "a value"
        loss = slopes.loss(spoilt(slopes.draw(rng), "last", bad))
        case.equal("what a skipped step() returns", iterate(optimizer, loss, scaler, explicit=explicit), None)
        case.equal("calls of optimizer.step()", len(optimizer.calls), 0)


@contract("AMP-OPTIMIZER-042")
@pytest.mark.parametrize("maker", [Ordinary, SelfScaling], ids=["ordinary", "self-scaling"])
def test_arguments_forwarded(
    case: Case, target: Target, rng: torch.Generator, maker: Callable[[Any], Ordinary]
) -> None:
    for enabled in (True, False):
        slopes = Slopes.make("dense", target.device, rng)
        optimizer = maker(slopes.groups())
        scaler = torch.amp.GradScaler(target.device_type, enabled=enabled)
        scaler.scale(slopes.loss(slopes.draw(rng))).backward()
        scaler.step(optimizer, 1, "two", third=3.0, fourth=None)
        expected = [((1, "two"), {"third": 3.0, "fourth": None})]
        case.equal(f"what optimizer.step() was called with (enabled={enabled})", optimizer.calls, expected)


# Several optimizers


@contract("AMP-OPTIMIZER-050")
@pytest.mark.parametrize("dirty", [(0,), (2,), *(deep("standard", d) for d in ((), (1,), (0, 2), (0, 1, 2)))], ids=str)
def test_each_optimizer_decides_alone(case: Case, target: Target, rng: torch.Generator, dirty: tuple[int, ...]) -> None:
    chosen = [PLAIN, FUSED if FUSED.promised_on(target.device_type) else PLAIN, _kind("Adagrad", "for-loop")]
    for explicit in ROUTES:
        slopes = [Slopes.make("dense", target.device, rng) for _ in chosen]
        twins = [workload.copy() for workload in slopes]
        optimizers = [kind.make(workload.groups()) for kind, workload in zip(chosen, slopes, strict=True)]
        plains = [kind.make(workload.groups()) for kind, workload in zip(chosen, twins, strict=True)]
        scaler = torch.amp.GradScaler(target.device_type)
        clean = [workload.draw(rng) for workload in slopes]
        for workload, slope, optimizer in zip(twins, clean, plains, strict=True):
            iterate(optimizer, workload.loss(slope))
        for number, workload in enumerate(slopes):
            slope = spoilt(clean[number], "last", math.inf) if number in dirty else clean[number]
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
            case.equal(f"optimizer {number} {verb}; what differs", departures(seen, expected), [])
        case.equal("scale after the one update()", scaler.get_scale(), 2.0 ** (15 if dirty else 16))


@contract("AMP-OPTIMIZER-051")
@BOTH
def test_foreign_inf_is_ignored(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make("dense", target.device, rng)
    twin = slopes.copy()
    optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
    stranger = torch.nn.Parameter(torch.ones(3, device=target.device))
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    iterate(optimizer, slopes.loss(slope) + (stranger * math.inf).sum(), scaler)
    iterate(plain, twin.loss(slope))
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(plain)), [])
    case.equal("gradient of the parameter that no optimizer owns", stranger.grad.tolist(), [math.inf] * 3)
    case.equal("scale", scaler.get_scale(), 65536.0)


# The fused protocol


@contract("AMP-OPTIMIZER-060")
@each(lambda kind: kind.scales_itself, variants=None)
@pytest.mark.parametrize("bad", [None, math.inf, deep("standard", math.nan)], ids=["clean", "inf", "nan"])
def test_fused_is_handed_scale_and_flag(
    case: Case, target: Target, rng: torch.Generator, kind: Kind, bad: float | None
) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make(kind.gradients, target.device, rng)
        optimizer = build(case, kind, slopes)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**12)
        seen: list[tuple[float | None, float]] = []

        def look(optimizer: Any, args: Any, kwargs: Any, seen: list[tuple[float | None, float]] = seen) -> None:
            scale = optimizer.grad_scale
            seen.append((None if scale is None else float(scale), float(optimizer.found_inf)))

        optimizer.register_step_pre_hook(look)
        slope = slopes.draw(rng)
        loss = slopes.loss(slope if bad is None else spoilt(slope, "last", bad))
        attributes = sorted(vars(optimizer))
        iterate(optimizer, loss, scaler, explicit=explicit)
        case.equal("times that step() ran", len(seen), 1)
        case.equal(f"grad_scale handed (unscale_ called: {explicit})", seen[0][0], None if explicit else 4096.0)
        case.equal("found_inf handed is above zero", seen[0][1] > 0, bad is not None)
        case.equal("attributes of the optimizer afterwards", sorted(vars(optimizer)), attributes)


@contract("AMP-OPTIMIZER-061")
@each(lambda kind: kind.fused)
@pytest.mark.parametrize(
    "elements", [deep("standard", n) for n in (1, 8, 15, 16, 17, 33)] + [1001, deep("standard", 40_001)]
)
def test_fused_kernel_at_any_size(case: Case, target: Target, rng: torch.Generator, kind: Kind, elements: int) -> None:
    build(case, kind, Slopes.make(kind.gradients, target.device, rng))
    values = torch.rand(elements, generator=rng).to(target.device) + 1
    slope = torch.randn(elements, generator=rng).to(target.device)
    ours, theirs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    optimizer, plain = kind.make([ours]), kind.make([theirs])
    scaler = torch.amp.GradScaler(target.device_type)
    iterate(optimizer, (ours * slope).sum(), scaler)
    iterate(plain, (theirs * slope).sum())
    for place in (0, elements // 2, elements - 1):
        before = snapshot(optimizer)
        bad = slope.clone()
        bad[place] = math.inf
        iterate(optimizer, (ours * bad).sum(), scaler)
        changed = departures(snapshot(optimizer), before)
        case.equal(f"what a step skipped for inf at element {place} changed", changed, [])
        iterate(optimizer, (ours * slope).sum(), scaler)
        iterate(plain, (theirs * slope).sum())
        case.equal("what differs from fp32 after a step", departures(snapshot(optimizer), snapshot(plain)), [])
        case.identical("gradient after it", ours.grad, slope)


@contract("AMP-OPTIMIZER-062")
@BAD
def test_self_scaling_third_party(case: Case, target: Target, rng: torch.Generator, bad: float) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make("dense", target.device, rng)
        optimizer, scaler = SelfScaling(slopes.groups()), torch.amp.GradScaler(target.device_type)
        start, slope = clones(slopes), slopes.draw(rng)
        iterate(optimizer, slopes.loss(spoilt(slope, "first", bad)), scaler, explicit=explicit)
        case.equal("parameters that moved in a skipped step", unmoved(slopes, start), list(range(len(start))))
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number} after a clean step, against p - g", parameter, began - gradient)
        handed = [(None if explicit else 65536.0, 1.0), (None if explicit else 32768.0, 0.0)]
        case.equal("scale and flag that it was handed in each iteration", optimizer.handed, handed)
        left = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
        case.equal("what is left on it afterwards", left, [])


@contract("AMP-OPTIMIZER-063")
def test_ordinary_third_party(case: Case, target: Target, rng: torch.Generator) -> None:
    for explicit in ROUTES:
        slopes = Slopes.make("dense", target.device, rng)
        optimizer, scaler = Ordinary(slopes.groups()), torch.amp.GradScaler(target.device_type)
        start, slope = clones(slopes), slopes.draw(rng)
        attributes = sorted(vars(optimizer))
        for bad in NON_FINITE.values():
            iterate(optimizer, slopes.loss(spoilt(slope, "last", bad)), scaler, explicit=explicit)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
        case.equal("what its step() could see of the scaler, once for each call", optimizer.handed, [[]])
        case.equal("its attributes afterwards", sorted(vars(optimizer)), attributes)
        for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
            case.identical(f"parameter {number}, against p - g", parameter, began - gradient)


@contract("AMP-OPTIMIZER-064")
@each(lambda kind: kind.scales_itself, variants=None)
def test_preset_scale_multiplies(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    twin = slopes.copy()
    optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
    scaler = torch.amp.GradScaler(target.device_type)
    slope = slopes.draw(rng)
    optimizer.grad_scale = torch.tensor(8.0, device=target.device)
    iterate(optimizer, slopes.loss([part * 8 for part in slope]), scaler)
    iterate(plain, twin.loss(slope))
    case.equal("what differs from fp32 on the gradient / 8", departures(snapshot(optimizer), snapshot(plain)), [])


# Hooks and schedulers


@contract("AMP-OPTIMIZER-070")
@each(lambda kind: not kind.fused, variants=None)
def test_hooks_follow_the_step(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    slope = slopes.draw(rng)
    for bad in NON_FINITE.values():
        iterate(optimizer, slopes.loss(spoilt(slope, "last", bad)), scaler)
    case.equal("hooks that ran in three skipped steps", ran, [])
    iterate(optimizer, slopes.loss(slope), scaler)
    case.equal("hooks that ran in a clean step", ran, ["pre", "post"])


@contract("AMP-OPTIMIZER-071")
@each(lambda kind: kind.fused, variants=None)
def test_hooks_of_fused(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
    ran: list[str] = []
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    slope = slopes.draw(rng)
    iterate(optimizer, slopes.loss(spoilt(slope, "last", math.inf)), scaler)
    case.note("post hooks that ran in a skipped step of a fused optimizer", len(ran))


@contract("AMP-OPTIMIZER-072")
@BOTH
def test_scheduled_rates(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make("dense", target.device, rng)
    twin = slopes.copy()
    optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
    schedules = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in (optimizer, plain)]
    scaler = torch.amp.GradScaler(target.device_type)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            slope = slopes.draw(rng)
            iterate(optimizer, slopes.loss(slope), scaler)
            iterate(plain, twin.loss(slope))
            for schedule in schedules:
                schedule.step()
    complaints = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    case.equal("warnings about the order of scheduler and optimizer", complaints, [])
    case.equal("rates after three clean steps", schedules[0].get_last_lr(), [kind.arguments["lr"] / 8] * 2)
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-073")
@BOTH
def test_scheduler_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: Kind) -> None:
    slopes = Slopes.make("dense", target.device, rng)
    optimizer = build(case, kind, slopes)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler(target.device_type)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterate(optimizer, slopes.loss(spoilt(slopes.draw(rng), "last", math.inf)), scaler)
        schedule.step()
    complaints = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    case.note("warnings when a scheduler steps after a skipped first step", len(complaints))
    case.note("rate after it, of the first rate", schedule.get_last_lr()[0] / kind.arguments["lr"])


# What users do around the step


@contract("AMP-OPTIMIZER-080")
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@each(lambda kind: kind.gradients != "sparse", variants=None)
def test_zero_grad(case: Case, target: Target, rng: torch.Generator, kind: Kind, set_to_none: bool) -> None:
    slopes = Slopes.make(kind.gradients, target.device, rng)
    twin = slopes.copy()
    optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
    scaler = torch.amp.GradScaler(target.device_type)
    for bad in (None, math.inf, None, math.nan, None):
        slope = slopes.draw(rng)
        scaler.scale(slopes.loss(slope if bad is None else spoilt(slope, "first", bad))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
        if bad is None:
            twin.loss(slope).backward()
            plain.step()
            plain.zero_grad(set_to_none=set_to_none)
        left = [None if p.grad is None else int(p.grad.count_nonzero()) for p in slopes.moving]
        expected = [None if set_to_none else 0] * len(left)
        case.equal("nonzero elements of the gradients after zero_grad()", left, expected)
    case.equal("what differs from fp32", departures(snapshot(optimizer), snapshot(plain)), [])


@contract("AMP-OPTIMIZER-081")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_step_without_the_scaler(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    kind = _kind("SGD", implementation, "plain")
    slopes = Slopes.make("dense", target.device, rng)
    optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
    start, slope = clones(slopes), slopes.draw(rng)
    scaler.scale(slopes.loss(slope)).backward()
    optimizer.step()
    for number, (parameter, began, gradient) in enumerate(zip(slopes.moving, start, slope, strict=True)):
        wrong = began.cpu().double() - 0.25 * 1024 * gradient.cpu().double()
        error = float(((parameter.cpu().double() - wrong).abs() / (began.cpu().abs() + wrong.abs())).max())
        case.at_most(f"distance of parameter {number} from p - lr * scale * g", error, 2 * U, "relative")
    optimizer.zero_grad()
    scaler.scale(slopes.loss(spoilt(slope, "last", math.inf))).backward()
    optimizer.step()
    case.equal("finite parameters after a direct step on inf", bool(slopes.moving[-1].isfinite().all()), False)


@contract("AMP-OPTIMIZER-082")
def test_closures(case: Case, target: Target, rng: torch.Generator) -> None:
    for name in filter(takes_closure, present()):
        slopes = Slopes.make("dense", target.device, rng)
        slope = slopes.draw(rng)
        optimizer = getattr(torch.optim, name)(list(slopes.parameters))
        scaler = torch.amp.GradScaler(target.device_type)

        def closure(optimizer: Any = optimizer, slopes: Slopes = slopes, slope: Any = slope) -> torch.Tensor:
            optimizer.zero_grad()
            loss = slopes.loss(slope)
            loss.backward()
            return loss

        before = snapshot(optimizer)
        scaler.scale(slopes.loss(slope)).backward()
        step = functools.partial(scaler.step, optimizer, closure=closure)
        case.raises(f"{name} with a closure", RuntimeError, step, "[Cc]losure")
        case.equal("what the refused step changed", departures(snapshot(optimizer), before), [])
        off = torch.amp.GradScaler(target.device_type, enabled=False)
        loss = off.step(optimizer, closure=closure)
        case.true("control: with a disabled scaler it steps", bool(departures(snapshot(optimizer), before)), loss)


@contract("AMP-OPTIMIZER-083")
def test_skip_needs_no_closure(case: Case, target: Target, rng: torch.Generator) -> None:
    for name in filter(takes_closure, present()):
        slopes = Slopes.make("dense", target.device, rng)
        optimizer, scaler = (
            getattr(torch.optim, name)(list(slopes.parameters)),
            torch.amp.GradScaler(target.device_type),
        )
        before = snapshot(optimizer)
        bad = spoilt(slopes.draw(rng), "last", math.nan)
        case.equal("what the skipped step returns", iterate(optimizer, slopes.loss(bad), scaler), None)
        case.equal(f"what a skipped step of {name} changed", departures(snapshot(optimizer), before), [])


def _kind(optimizer: str, implementation: str, variant: str | None = None) -> Kind:
    return next(
        kind
        for kind in ALL
        if (kind.optimizer, kind.implementation) == (optimizer, implementation)
        and (kind.first if variant is None else kind.variant == variant)
    )
