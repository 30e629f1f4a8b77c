"""Check loss scaling on accelerators: synchronization, CUDA graphs, streams and several devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, contract, needs
from ...harness.targets import Target, one_device_only, second
from ...measure.waits import raising_at_waits
from ...oracles.fake_devices import PaperDevices, PaperTensor
from ...scaler import model as oracle
from ...workloads.gradients import holding
from ...workloads.graphs import captured
from ...workloads.third_party_optimizers import Ordinary, record_of
from .support import has_tensor, on_fake_tensors

# The input of each iteration; the gradient is that times the scale, rounded to fp16. At scales of 2 to 8 the scale
# grows, halves and skips: 20000 * 4 is beyond fp16's 65504.
DATA = (5.0, 5.0, 20000.0, 5.0, 20000.0, 20000.0, 20000.0, 20000.0, 3.0, 3.0, 20000.0)
START, INTERVAL, RATE = 4.0, 2, 0.5


class SelfScaling(Ordinary):
    """A self-scaling optimizer that reads flag and scale with item(), which fake devices support."""

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor
    found_inf: torch.Tensor

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.found_inf.item():
            for parameter in self._moving():
                parameter -= parameter.grad / self.grad_scale.item()


class Problem:
    """Weights whose gradient is the input, computed in fp16 under autocast, and a scaler with a low initial scale."""

    def __init__(self, target: Target, *, fused: bool) -> None:
        self.target = target
        self.weights = torch.nn.Parameter(torch.zeros(6, 1, device=target.device))
        self.input = torch.full((1, 6), DATA[0], device=target.device)
        self.optimizer = torch.optim.SGD([self.weights], lr=RATE, fused=fused, foreach=False if not fused else None)
        self.scaler = torch.amp.GradScaler(target.device_type, init_scale=START, growth_interval=INTERVAL)

    def backward(self) -> None:
        """Run forward under autocast without its cache, as a capture requires, and backward of the scaled loss."""
        with self.target.autocast(torch.float16, cache_enabled=False):
            loss = torch.mm(self.input, self.weights).float().sum()
        self.scaler.scale(loss).backward()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def seen(self) -> tuple[float, int, list[float], list[float]]:
        """Return scale, tracker, and the distinct values of gradient and weights."""
        gradient = self.weights.grad
        assert gradient is not None
        scale, count = self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]
        return scale, count, gradient.unique().tolist(), self.weights.detach().unique().tolist()


def expected_iterations(data: Sequence[float]) -> Iterator[tuple[float, int, float, float, float]]:
    """Yield the expected scale, tracker, scaled gradient, unscaled gradient and weight after each iteration."""
    scale, tracker, weight = START, 0, 0.0
    for value in data:
        scaled = oracle.Gradient((oracle.rounded(value * scale, oracle.FP16),))
        (unscaled,), found = oracle.check_and_unscale([scaled], 0.0, oracle.reciprocal(scale))
        if not found:
            weight -= RATE * unscaled.values[0]
        scale, tracker = oracle.update_scale(scale, tracker, found, 2.0, 0.5, INTERVAL)
        yield scale, tracker, scaled.values[0], unscaled.values[0], weight


# Synchronization


@contract("AMP-SCALE-160", on="cuda")
@pytest.mark.parametrize("count", [1, 2], ids=["one-optimizer", "two-optimizers"])
def test_nothing_waits(case: Case, target: Target, count: int) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0, growth_interval=1)
    groups = [holding([torch.full((3,), 8.0 + n, device=target.device)]) for n in range(count)]
    optimizers = [Ordinary(parameters) for parameters in groups]
    outputs = [torch.full((), 2.0, device=target.device) for _ in range(3)]
    new = torch.tensor(16.0, device=target.device)
    with raising_at_waits():
        scaled = [scaler.scale(outputs[0]), *scaler.scale(outputs[1:])]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        scaler.update()
        scaler.update(32.0)
        scaler.update(new)
        case.raises("control: get_scale synchronizes", RuntimeError, scaler.get_scale)
    case.equal("scaled outputs", [one.item() for one in scaled], [8.0] * 3)
    gradients = [parameters[0].grad.tolist() for parameters in groups if parameters[0].grad is not None]
    case.equal("gradients", gradients, [[(8.0 + n) / 4.0] * 3 for n in range(count)])
    case.equal("scale", scaler.get_scale(), 16.0)


@contract("AMP-SCALE-161", on="cuda")
def test_an_ordinary_step_waits(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0)
    parameters = holding([torch.full((3,), 8.0, device=target.device)])
    optimizer = Ordinary(parameters)
    scaler.scale(torch.ones((), device=target.device))
    scaler.unscale_(optimizer)
    with raising_at_waits():
        case.raises(
            "step() of an optimizer that cannot skip by itself",
            RuntimeError,
            lambda: scaler.step(optimizer),
        )
    case.equal("steps taken", len(optimizer.calls), 0)
    scaler.step(optimizer)
    case.equal("control: steps taken if synchronization is allowed", len(optimizer.calls), 1)


# Graphs


@contract("AMP-SCALE-162", on="cuda", dtypes=("fp16",))
@needs("graphs")
def test_captured_backward(case: Case, target: Target) -> None:
    problem = Problem(target, fused=False)
    replay = captured(problem.backward, problem.optimizer)
    for number, (value, expected) in enumerate(zip(DATA, expected_iterations(DATA), strict=True)):
        problem.input.fill_(value)
        replay()
        scale, tracker, scaled, _, weight = expected
        case.equal(f"gradient after replay {number + 1}", problem.seen()[2], [scaled])
        problem.finish()
        seen = problem.seen()
        case.equal(
            f"scale, tracker and weights after replay {number + 1}", (*seen[:2], *seen[3]), (scale, tracker, weight)
        )
    scales = [scale for scale, *_ in expected_iterations(DATA)]
    case.equal("control: the scale grows and halves", (max(scales), min(scales)), (8.0, 2.0))


@contract("AMP-SCALE-163", on="cuda", dtypes=("fp16",))
@needs("graphs")
def test_captured_iteration(case: Case, target: Target) -> None:
    problem = Problem(target, fused=True)

    def iteration() -> None:
        problem.backward()
        problem.finish()

    replay = captured(iteration, problem.optimizer)
    expected = list(
        expected_iterations((DATA[0], *DATA))
    )  # one iteration runs before the capture, with the first input
    case.equal("scale and tracker after the capture", problem.seen()[:2], expected[0][:2])
    for number, (value, (scale, tracker, _, unscaled, weight)) in enumerate(zip(DATA, expected[1:], strict=True)):
        problem.input.fill_(value)
        replay()
        seen = problem.seen()
        case.equal(
            f"scale, tracker and weights after replay {number + 1}", (*seen[:2], *seen[3]), (scale, tracker, weight)
        )
        if math.isfinite(unscaled):
            case.equal(f"gradient after replay {number + 1}", seen[2], [unscaled])
    tracks = {(scale, tracker) for scale, tracker, *_ in expected}
    case.at_least("control: distinct states of scale and tracker", len(tracks), 4)


@contract("AMP-SCALE-164", on=("fake:cuda", "torch.cuda"))
def test_graphed_callables_refuse_the_cache(case: Case, target: Target) -> None:
    module = torch.nn.Linear(2, 2)
    sample = (torch.zeros(1, 2),)
    # The error is raised before anything is captured, so it needs no device.
    with target.autocast(torch.float16, cache_enabled=True):
        case.raises(
            "make_graphed_callables in a region with the cache",
            RuntimeError,
            lambda: torch.cuda.make_graphed_callables(module, sample),
            names=("cache_enabled",),
        )
    cache_errors = []
    for enabled, cache in ((False, True), (True, False)):
        with target.autocast(torch.float16, enabled=enabled, cache_enabled=cache):
            try:
                torch.cuda.make_graphed_callables(None, sample)
            except Exception as error:
                cache_errors.append("cache_enabled" in str(error))
    case.equal("control: the same error without a region, and without the cache", cache_errors, [False, False])


# Streams


@contract("AMP-SCALE-165", on="accelerator", dtypes=("fp16",))
@needs("streams")
def test_streams(case: Case, target: Target) -> None:
    case.require(target, torch.float16)
    module = torch.get_device_module(target.device_type)
    alone, spread = Problem(target, fused=False), Problem(target, fused=False)
    with target.current():
        side, other = module.Stream(), module.Stream()
        for number, (value, expected) in enumerate(zip(DATA, expected_iterations(DATA), strict=True)):
            for problem in (alone, spread):
                problem.input.fill_(value)
                problem.optimizer.zero_grad()
            alone.backward()
            alone.finish()
            side.wait_stream(module.current_stream())
            with module.stream(side):
                spread.backward()
            other.wait_stream(side)
            with module.stream(other):
                spread.scaler.unscale_(spread.optimizer)
            module.current_stream().wait_stream(other)
            spread.finish()
            scale, tracker, _, unscaled, weight = expected
            promised = as_text((scale, tracker, [unscaled], [weight]))
            case.equal(f"state after iteration {number + 1}, on one stream", as_text(alone.seen()), promised)
            case.equal(f"state after iteration {number + 1}, on several streams", as_text(spread.seen()), promised)


def as_text(seen: tuple[float, int, list[float], list[float]]) -> str:
    """Return the state as text, in which NaN equals NaN."""
    return repr(seen)


# Several devices


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor, on a fake device or a real one."""
    return tensor.numbers if isinstance(tensor, PaperTensor) else tensor


def judge_devices(
    case: Case,
    output: torch.Tensor,
    gradients: list[torch.Tensor],
    bad_index: int | None,
    self_scaling: bool,
    what: str,
) -> None:
    """Check one iteration at scale 4 with gradients on several devices, of which number `bad_index` is non-finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    case.equal(f"scaled output, {what}", bare(scaler.scale(output)).item(), 4.0 * bare(output).item())
    parameters = holding(gradients)
    before = [bare(one.grad).clone() for one in parameters if one.grad is not None]
    optimizer = SelfScaling(parameters) if self_scaling else Ordinary(parameters)
    if has_tensor(scaler, "_scale"):
        scale = scaler._scale
        assert scale is not None
        case.equal(f"device of the scale, {what}", scale.device, output.device)
    if not self_scaling:
        scaler.unscale_(optimizer)
        after = [bare(one.grad) for one in parameters if one.grad is not None]
        wrong = [n for n, (now, then) in enumerate(zip(after, before, strict=True)) if not same(now, then / 4.0)]
        case.equal(f"gradients that are not unscaled once, {what}", wrong, [])
        if (record := record_of(scaler, optimizer)) is not None:
            judge_flags(case, record["found_inf_per_device"], gradients, bad_index, what)
    scaler.step(optimizer)
    moved = [bool(bare(one.detach()).count_nonzero()) for one in parameters]
    case.equal(f"parameters that moved, {what}", moved, [bad_index is None] * len(gradients))
    if bad_index is None:
        wrong = [
            n
            for n, (one, then) in enumerate(zip(parameters, before, strict=True))
            if not same(bare(one.detach()), -then / 4.0)
        ]
        case.equal(f"parameters whose step is not the unscaled gradient, {what}", wrong, [])
    scaler.update()
    case.equal(f"scale after update(), {what}", scaler.get_scale(), 8.0 if bad_index is None else 2.0)


def judge_flags(
    case: Case,
    found: dict[torch.device, torch.Tensor],
    gradients: list[torch.Tensor],
    bad_index: int | None,
    what: str,
) -> None:
    """Check the flag of each device that torch's scaler records; those of other scalers show in step() and update()."""
    bad = None if bad_index is None else gradients[bad_index].device
    expected = {one.device: float(one.device == bad) for one in gradients}
    case.equal(f"flag of each device, {what}", {device: bare(flag).item() for device, flag in found.items()}, expected)
    case.equal(f"devices of the flags, {what}", [flag.device for flag in found.values()], list(found))


def same(seen: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    return seen.dtype == expected.dtype and torch.equal(seen.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


NON_FINITE_AT: tuple[tuple[int | None, float], ...] = (
    (None, 0.0), (0, math.inf), (1, math.nan), (2, -math.inf), (3, math.inf), (4, math.nan),
)  # fmt: skip


@contract("AMP-SCALE-166")
@pytest.mark.parametrize("self_scaling", [False, True], ids=["ordinary", "self-scaling"])
def test_devices_on_paper(case: Case, self_scaling: bool) -> None:
    """Use the CPU and two fake devices, whose operations reject operands on different devices as real ones do."""
    values = ([8.0, -4.0], [12.0], [16.0, 0.0, 2.0], [20.0], [1.0, 3.0])
    places = (0, 1, None, 1, 0)
    for home, (bad_index, bad) in itertools.product((0, 1), NON_FINITE_AT):
        with on_fake_tensors(case), PaperDevices() as devices:
            gradients = []
            for number, (numbers, place) in enumerate(zip(values, places, strict=True)):
                numbers = [*numbers[:-1], bad] if number == bad_index else numbers
                dtype = torch.float64 if number == 3 else torch.float32
                made = torch.tensor(numbers, dtype=dtype)
                gradients.append(made if place is None else PaperTensor(made, devices.device(place)))
            what = f"scale on device {home}, " + (
                "all finite" if bad_index is None else f"{bad} in gradient {bad_index}"
            )
            judge_devices(case, devices.tensor(3.0, home), gradients, bad_index, self_scaling, what)


@contract("AMP-SCALE-166", on="accelerator")
@applies(one_device_only)
@pytest.mark.parametrize("self_scaling", [False, True], ids=["ordinary", "self-scaling"])
def test_two_devices(case: Case, target: Target, self_scaling: bool) -> None:
    other = second(target)
    for home, (bad_index, bad) in itertools.product((target.device, other), NON_FINITE_AT[:4]):
        values = ([8.0, -4.0], [12.0], [16.0, 0.0, 2.0])
        gradients = [
            torch.tensor([*numbers[:-1], bad] if number == bad_index else numbers, device=device)
            for number, (numbers, device) in enumerate(zip(values, (target.device, other, other), strict=True))
        ]
        what = f"scale on {home}, " + ("all finite" if bad_index is None else f"{bad} in gradient {bad_index}")
        judge_devices(case, torch.tensor(3.0, device=home), gradients, bad_index, self_scaling, what)


@contract("AMP-SCALE-167")
def test_copies_for_devices_on_paper(case: Case) -> None:
    """Count the copies between devices: scale, factor and flag once for each other device."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with on_fake_tensors(case), PaperDevices() as devices:
        outputs = [devices.tensor(2.0, 0), devices.tensor(3.0, 1), (devices.tensor(5.0, 1), torch.tensor(7.0))]
        scaled = scaler.scale(outputs)
        flat = [scaled[0], scaled[1], *scaled[2]]
        case.equal("scaled outputs", [bare(one).item() for one in flat], [8.0, 12.0, 20.0, 28.0])
        case.equal("their devices", [one.device.index for one in flat], [0, 1, 1, None])
        home, away, host = devices.device(0), devices.device(1), torch.device("cpu")
        case.equal("copies of the scale", devices.moves, [(home, away), (home, host)])
        devices.moves.clear()
        gradients = [
            devices.tensor([8.0], place, dtype) for place in (0, 1) for dtype in (torch.float32, torch.float64)
        ]
        optimizer = Ordinary(holding([*gradients, *(devices.tensor([4.0], 1) for _ in range(3))]))
        scaler.unscale_(optimizer)
        # A flag that is made where the gradients are need not be copied.
        case.equal("copies of flag and factor, from where to where", set(devices.moves), {(home, away)})
        case.at_most("copies of flag and factor", len(devices.moves), 2)
        case.equal("devices from which a number was read", [device for device in devices.reads if device != host], [])
        devices.moves.clear()
        scaler.update()
        case.equal("copies of flags for update()", devices.moves, [(away, home)])
        case.equal(
            "devices from which update() read a number", [device for device in devices.reads if device != host], []
        )


# Several dtypes


@contract("AMP-SCALE-168")
def test_several_dtypes(case: Case, target: Target) -> None:
    case.require_arithmetic(target, torch.float64)
    values = ([8.0, -4.0], [12.0], [16.0, 0.0, 2.0])
    for dtypes in itertools.product((torch.float32, torch.float64), repeat=3):
        for bad_index, bad in NON_FINITE_AT[:4]:
            gradients = [
                torch.tensor(
                    [*numbers[:-1], bad] if number == bad_index else numbers, dtype=dtype, device=target.device
                )
                for number, (numbers, dtype) in enumerate(zip(values, dtypes, strict=True))
            ]
            names = "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            what = f"{names}, " + ("all finite" if bad_index is None else f"{bad} in gradient {bad_index}")
            judge_devices(case, torch.tensor(3.0, device=target.device), gradients, bad_index, False, what)
