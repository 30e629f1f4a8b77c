"""Check what GradScaler sets on and passes to third-party optimizers, and that it removes it after the step."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.message_names import FOUND_INF, STEPPED
from ...oracles.optimizer_state import differences, gradients, snapshot
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from ...workloads.third_party_optimizers import (
    Ordinary,
    SelfScaling,
    TakesScaler,
    answering,
    give,
    owning,
    parameters_of,
)
from .optimizer_configs import OptimizerConfig
from .support import (
    ALL,
    BY_ROUTE,
    PLAIN,
    PROTOCOL,
    ROUTES,
    clones,
    iterate,
    left_on,
    started,
    tracker,
    twins,
    unmoved,
)


class Overwriting(SelfScaling):
    """Records the tensors that it receives, and overwrites them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.tensors: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().step(*args, **kwargs)
        self.tensors.append({name: getattr(self, name) for name in PROTOCOL})
        for tensor in self.tensors[-1].values():
            if tensor is not None:
                tensor.fill_(7.0)
        return answer


@contract("AMP-OPTIMIZER-065")
def test_handed_tensors(case: Case, target: Target, rng: torch.Generator) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        optimizer, scaler = Overwriting(slopes.groups()), torch.amp.GradScaler(target.device_type, growth_interval=100)
        slope, expected = slopes.draw(rng), (65536.0, 0)
        for bad in (None, math.inf, None, math.nan, -math.inf, None):
            start = clones(slopes)
            iterate(
                optimizer,
                slopes.loss(slope if bad is None else with_nonfinite(slope, "last", bad)),
                scaler,
                explicit=explicit,
            )
            received = optimizer.tensors[-1]
            for name, tensor in received.items():
                if name == "grad_scale" and explicit:
                    case.equal("grad_scale after unscale_()", tensor, None)
                    continue
                form = type(tensor).__name__, tensor.dtype, tensor.numel(), tensor.device
                case.equal(
                    f"{name}: type, dtype, elements and device",
                    form,
                    (type(slopes.moving[0].detach()).__name__, torch.float32, 1, slopes.moving[0].device),
                )
            expected = (expected[0] / 2, 0) if bad is not None else (expected[0], expected[1] + 1)
            state = scaler.get_scale(), scaler.state_dict()["_growth_tracker"]
            case.equal("scale and tracker, after the optimizer overwrote the tensors that it received", state, expected)
            case.equal("parameters that moved", len(start) - len(unmoved(slopes, start)), 0 if bad is not None else 4)


@contract("AMP-OPTIMIZER-060")
@pytest.mark.parametrize("value", [2.0, math.inf, -math.inf, math.nan], ids=["finite", "inf", "minus-inf", "nan"])
def test_handed_scale_and_flag(case: Case, target: Target, value: float) -> None:
    gradients = [torch.tensor([2.0, last], device=target.device) for last in (2.0, value)]
    optimizer = owning(*gradients, kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    found = 0.0 if math.isfinite(value) else 1.0
    case.equal("step() returns", scaler.step(optimizer), "stepped")
    case.equal("scale and flag that it received", optimizer.received, [(48.0, found)])
    case.equal("gradients that it received, still scaled", gradients[0].tolist(), [2.0, 2.0])
    left = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
    case.equal("attributes left on the optimizer", left, [])
    case.raises("step twice", RuntimeError, lambda: scaler.step(optimizer), names=(STEPPED,))
    scaler.update()
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), (24.0, 0) if found else (48.0, 1))


@contract("AMP-OPTIMIZER-060")
@pytest.mark.parametrize("value", [96.0, math.inf, math.nan], ids=["finite", "inf", "nan"])
def test_handed_no_scale_after_unscale(case: Case, target: Target, value: float) -> None:
    gradients = [torch.tensor([96.0], device=target.device), torch.tensor([value], device=target.device)]
    optimizer = owning(*gradients, kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    found = 0.0 if math.isfinite(value) else 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("scale and flag that it received", optimizer.received, [(None, found)])
    case.equal("gradients, unscaled once", gradients[0].tolist(), [2.0])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 24.0 if found else 48.0)


@contract("AMP-OPTIMIZER-060")
def test_handed_flag_stands(case: Case, target: Target) -> None:
    optimizer = owning(torch.tensor([math.inf], device=target.device), kind=SelfScaling)
    scaler = started(target)
    scaler.unscale_(optimizer)
    give(optimizer, 1.0)
    scaler.step(optimizer)
    case.equal("scale and flag after the non-finite gradient was replaced", optimizer.received, [(None, 1.0)])


@contract("AMP-OPTIMIZER-064")
def test_preset_scale_multiplies(case: Case, target: Target) -> None:
    optimizer = owning(torch.ones(2, device=target.device), kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    optimizer.grad_scale = torch.tensor(4.0, device=target.device)
    scaler.step(optimizer)
    case.equal("scale and flag that it received", optimizer.received, [(192.0, 0.0)])
    case.equal("the scaler's own scale", scaler.get_scale(), 48.0)


class KeywordOnly(TakesScaler):
    """An optimizer of the older protocol with a keyword-only argument."""

    def step(self, *, grad_scaler: Any = None) -> Any:
        return super().step(grad_scaler=grad_scaler)


class TakesAnything(SelfScaling):
    """A self-scaling optimizer with **kwargs, which do not select the older protocol."""

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        self.received.append(sorted(kwargs))
        return super().step()


@contract("AMP-OPTIMIZER-067")
@pytest.mark.parametrize("scheduled", [False, True], ids=["alone", "with-scheduler"])
@pytest.mark.parametrize("maker", [TakesScaler, KeywordOnly], ids=["argument", "keyword-only"])
def test_older_protocol(case: Case, target: Target, rng: torch.Generator, maker: Any, scheduled: bool) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make("dense", target.device, rng)
        twin = slopes.copy()
        optimizer, plain = maker(slopes.groups()), Ordinary(twin.groups())
        if scheduled:  # which wraps the optimizer's step
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1.0
            lr_scheduler.StepLR(optimizer, 1)
        seen: list[list[str]] = []
        optimizer.register_step_pre_hook(lambda one, args, kwargs, seen=seen: seen.append(left_on(one)))
        scaler = torch.amp.GradScaler(target.device_type)
        scales = []
        for bad in (None, math.inf, None):
            slope = slopes.draw(rng)
            loss = slopes.loss(slope if bad is None else with_nonfinite(slope, "last", bad))
            call = functools.partial(iterate, optimizer, loss, scaler, explicit=explicit)
            answer = case.warns("the step", FutureWarning, call, names=(FOUND_INF,))
            case.equal("result of step()", answer, "stepped")
            scales.append(scaler.get_scale())
            if bad is None:
                iterate(plain, twin.loss(slope))
            for number, (ours, theirs) in enumerate(zip(slopes.parameters, twin.parameters, strict=True)):
                case.identical(f"parameter {number}, against an ordinary optimizer without a scaler", ours, theirs)
        case.true("it received the scaler in each step", [one for one, _ in optimizer.received] == [scaler] * 3)
        case.equal("attributes set during its steps", [names for names in seen if names], [])
        case.equal("scales", scales, [65536.0, 32768.0, 32768.0])


@contract("AMP-OPTIMIZER-067")
def test_kwargs_are_not_the_older_protocol(case: Case, target: Target, rng: torch.Generator) -> None:
    slopes = LinearLoss.make("dense", target.device, rng)
    optimizer, scaler = TakesAnything(slopes.groups()), torch.amp.GradScaler(target.device_type)
    scaler.scale(slopes.loss(slopes.draw(rng))).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.step(optimizer, own=1)
    case.equal("arguments, then scale and flag", optimizer.received, [["own"], (65536.0, 0.0)])
    case.equal("warnings of the older protocol", [w for w in caught if w.category is FutureWarning], [])


@contract("AMP-OPTIMIZER-067")
@pytest.mark.parametrize("value", [96.0, math.inf], ids=["finite", "inf"])
def test_handed_scaler(case: Case, target: Target, value: float) -> None:
    optimizer = owning(torch.tensor([96.0, value], device=target.device), kind=TakesScaler)
    scaler = started(target, init_scale=48.0)
    answer = case.warns("step()", FutureWarning, lambda: scaler.step(optimizer), names=(FOUND_INF,))
    case.equal("step() returns", answer, "stepped")
    found = 0.0 if math.isfinite(value) else 1.0
    case.true("its step received the scaler", [received for received, _ in optimizer.received] == [scaler])
    case.equal(
        "the flag that it read from the scaler, twice", [flags for _, flags in optimizer.received], [[found, found]]
    )
    case.equal("its gradient, unscaled", parameters_of(optimizer)[0].grad[0].item(), 2.0)
    scaler.update()
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), (24.0, 0) if found else (48.0, 1))


class Interrupted(Exception):
    """Raised to interrupt a step."""


@contextmanager
def interrupted(optimizer: Any) -> Iterator[None]:
    """Make the next step raise before it does anything."""

    def refuse(*_: Any) -> None:
        raise Interrupted

    handle = optimizer.register_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


SCALING = [PLAIN, *(kind for kind in ALL if kind.scales_itself and kind.first)]


@contract("AMP-OPTIMIZER-068")
@pytest.mark.parametrize("kind", SCALING, ids=[kind.id for kind in SCALING])
def test_step_that_raised(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    case.require_arithmetic(target, torch.float64)
    for explicit in ROUTES:
        slopes, twin, optimizer, plain = twins(case, target, rng, kind)
        scaler = torch.amp.GradScaler(target.device_type)
        slope = slopes.draw(rng)
        with interrupted(optimizer):
            call = functools.partial(iterate, optimizer, slopes.loss(slope), scaler, explicit=explicit)
            case.raises("the interrupted step", Interrupted, call)
        case.equal("attributes left on the optimizer", left_on(optimizer), [])
        scaler.step(optimizer)  # retry with the same gradients
        scaler.update()
        iterate(plain, twin.loss(slope))
        seen = {**snapshot(optimizer), **gradients(slopes.parameters)}
        expected = {**snapshot(plain), **gradients(twin.parameters)}
        case.equal("differences from fp32 after the retry", differences(seen, expected), [])


@contract("AMP-OPTIMIZER-040")
@BY_ROUTE
@pytest.mark.parametrize("answer", [0.0, 1.5, None, "loss"], ids=["zero", "float", "none", "text"])
def test_return_value(case: Case, target: Target, explicit: bool, answer: Any) -> None:
    for value, expected in ((1.0, answer), (math.inf, None)):
        optimizer = owning(torch.tensor(value, device=target.device), kind=lambda p: answering(p, answer))
        scaler = started(target)
        if explicit:
            scaler.unscale_(optimizer)
        case.equal(f"step() with a gradient of {value}", scaler.step(optimizer), expected)


@contract("AMP-OPTIMIZER-042")
@BY_ROUTE
def test_arguments(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(torch.ones((), device=target.device))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, 1, "two", three=3, four=None)
    case.equal("arguments of optimizer.step()", optimizer.calls, [((1, "two"), {"three": 3, "four": None})])
