"""Check the scaler where an optimizer or a pass raises, in threads, and in regions and other settings of the caller."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.flags import held
from ...oracles.region.stack_model import observe
from .support import ROUTES, started, tracker

SCALE = 1000.0


class Raising(torch.optim.SGD):
    """An optimizer that raises `error` in its first step, before it changes anything."""

    def __init__(self, parameters: list[Tensor], error: type[BaseException]) -> None:
        super().__init__(parameters, lr=1.0)
        self.error: type[BaseException] | None = error

    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error("from the optimizer")
        return super().step(closure)


def _raised_by_a_hook(parameters: list[Tensor], error: type[BaseException]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=1.0)

    def hook(*_: Any) -> None:
        handle.remove()
        raise error("from a hook")

    handle = optimizer.register_step_pre_hook(hook)
    return optimizer


SOURCES: dict[str, Callable[[list[Tensor], type[BaseException]], torch.optim.Optimizer]] = {
    "step": Raising,
    "hook": _raised_by_a_hook,
}
ERRORS = {"memory": torch.OutOfMemoryError, "value": ValueError, "interrupt": KeyboardInterrupt}


@contract("AMP-SCALE-196")
@ROUTES
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("then", ["again", "update"])
def test_step_that_raises(
    case: Case, target: Target, rng: torch.Generator, then: str, source: str, error: str, explicit: bool
) -> None:
    """Call step() again, or go on with update() and the next iteration, as a loop that catches the error does."""
    slopes = [torch.randn(5, generator=rng).to(target.device) for _ in range(2)]
    weight = torch.nn.Parameter(torch.randn(5, generator=rng).to(target.device))
    kept = weight.detach().clone()
    optimizer = SOURCES[source]([weight], ERRORS[error])
    scaler = started(target, init_scale=1024.0, growth_interval=5)  # scaling by a power of two is exact
    weight.grad = slopes[0] * 1024.0
    if explicit:
        scaler.unscale_(optimizer)
    caught = False
    try:
        scaler.step(optimizer)
    except ERRORS[error]:
        caught = True
    case.equal("the error comes out of step()", caught, True)
    case.identical("parameters after the error", weight, kept)
    case.identical("gradients after the error", weight.grad, slopes[0])
    expected = kept
    if then == "again":
        scaler.step(optimizer)
        expected = expected - slopes[0]
        case.identical("gradients after step() again", weight.grad, slopes[0])
        case.identical("parameters after step() again", weight, expected)
    scaler.update()
    case.equal("scale, tracker after update()", (scaler.get_scale(), tracker(scaler)), (1024.0, 1))
    weight.grad = slopes[1] * 1024.0
    scaler.step(optimizer)
    scaler.update()
    case.identical("parameters after the next iteration", weight, expected - slopes[1])
    case.equal("scale, tracker after it", (scaler.get_scale(), tracker(scaler)), (1024.0, 2))


SETTINGS: dict[str, Callable[[Target, torch.dtype], contextlib.AbstractContextManager[Any]]] = {
    "region": lambda target, dtype: target.autocast(dtype),
    "region-without-cache": lambda target, dtype: target.autocast(dtype, cache_enabled=False),
    "region-of-the-cpu": lambda target, dtype: torch.autocast("cpu", dtype),
    "disabled-region": lambda target, dtype: target.autocast(dtype, enabled=False),
    "no-grad": lambda target, dtype: torch.no_grad(),
    "16-bit-default-dtype": lambda target, dtype: held("torch.get_default_dtype", dtype),
}
CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "list": lambda loss: [loss, loss],
    "tuple": lambda loss: (loss, [loss]),
}


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [each for part in outputs for each in _flat(part)]


@contract("AMP-SCALE-197")
@pytest.mark.parametrize("setting", SETTINGS)
def test_calls_in_a_setting_of_the_caller(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, setting: str
) -> None:
    for dtype in (torch.float32, torch.float64):
        if not target.computes_in(dtype):
            continue
        # Numbers that have no 16-bit form.
        outputs, slope, start = (torch.randn(4, generator=rng).to(target.device, dtype) for _ in range(3))
        found = []
        for around in (contextlib.nullcontext, lambda: SETTINGS[setting](target, amp_dtype)):
            scaler, weight = started(target, init_scale=SCALE, growth_interval=1), torch.nn.Parameter(start.clone())
            optimizer = torch.optim.SGD([weight], lr=0.3, momentum=0.7)
            seen: dict[str, Any] = {}
            weight.grad = slope * SCALE
            with around():
                for name, contained in CONTAINERS.items():
                    scaled = _flat(scaler.scale(contained(outputs)))
                    seen |= {f"scaled {name}, part {place}": part for place, part in enumerate(scaled)}
                scaler.unscale_(optimizer)
                seen["unscaled gradient"] = weight.grad.clone()
                scaler.step(optimizer)
                scaler.update()
            seen["parameters"] = weight.detach()
            seen["momentum"] = optimizer.state[weight]["momentum_buffer"]
            seen["state of the scaler"] = scaler.state_dict()
            found.append(seen)
        plain, inside = found
        apart = {name: inside[name] for name, value in plain.items() if not _same(inside[name], value)}
        case.equal(f"{dtype}: what differs from the calls outside", apart, {})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


class _Interrupted(Exception):
    """Raised where a pass of the test is to end."""


class _Layer(torch.nn.Module):
    """Two products, with a point between them at which forward or backward can be made to raise."""

    def __init__(self, rng: torch.Generator, device: torch.device) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.randint(-2, 3, (4, 4), generator=rng).float().to(device) for _ in range(2)
        )
        self.raises_in: str | None = None

    def forward(self, features: Tensor) -> Tensor:
        hidden = features @ self.weights[0]
        if self.raises_in == "forward":
            raise _Interrupted
        if self.raises_in == "backward":
            hidden.register_hook(self._raise)
        output: Tensor = hidden @ self.weights[1]
        return output

    def _raise(self, _: Tensor) -> None:
        raise _Interrupted


def _trained(
    target: Target, dtype: torch.dtype, seed: int, errors: dict[int, str], wait: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Train for six iterations, of which one overflows; one that raises is given up and done once more."""
    rng, overflow = torch.Generator().manual_seed(seed), seed % 6
    layer = _Layer(rng, target.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-6, momentum=0.5)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=16.0, growth_interval=2)
    scales = []
    for number in range(6):
        features = torch.randint(-2, 3, (3, 4), generator=rng).float().to(target.device)
        for error in [errors[number], None] if number in errors else [None]:
            slope = math.inf if number == overflow or error else 1.0  # what is given up would have been skipped
            layer.raises_in = error if error in ("forward", "backward") else None
            wait()
            optimizer.zero_grad()
            try:
                with target.autocast(dtype):
                    loss = (layer(features).float() * slope).sum()
                scaler.scale(loss).backward()
                if error == "after backward":
                    raise _Interrupted
            except _Interrupted:
                continue
            wait()
            scaler.step(optimizer)
            wait()
            scaler.update()
        scales.append((scaler.get_scale(), tracker(scaler)))
    state = {f"parameter {place}": weight.detach() for place, weight in enumerate(layer.parameters())}
    return {**state, "scales and trackers": scales}


@contract("AMP-SCALE-198")
@pytest.mark.parametrize("point", ["forward", "backward", "after backward"], ids=lambda point: point.replace(" ", "_"))
def test_iterations_that_raise(case: Case, target: Target, amp_dtype: torch.dtype, point: str) -> None:
    before = observe()
    expected = _trained(target, amp_dtype, case.seed, {})
    for number in range(6):
        seen = _trained(target, amp_dtype, case.seed, {number: point})
        apart = {name: seen[name] for name, value in expected.items() if not _same(seen[name], value)}
        case.equal(f"an error in iteration {number}: what differs from training without it", apart, {})
        case.equal(f"an error in iteration {number}: autocast state", observe().differences(before), [])


@contract("AMP-SCALE-199")
def test_scalers_in_threads(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """Train three models in three threads that take each step of an iteration together."""
    seeds = [case.seed + number for number in range(3)]
    expected = [_trained(target, amp_dtype, seed, {}) for seed in seeds]
    barrier = threading.Barrier(len(seeds), timeout=60)

    def train(seed: int) -> dict[str, Any]:
        try:
            return _trained(target, amp_dtype, seed, {}, barrier.wait)
        except BaseException:
            barrier.abort()  # the others wait for this one
            raise

    with ThreadPoolExecutor(len(seeds)) as pool:
        training = [pool.submit(train, seed) for seed in seeds]
        found = [each.result() for each in training]
    for number, (seen, promised) in enumerate(zip(found, expected, strict=True)):
        apart = {name: seen[name] for name, value in promised.items() if not _same(seen[name], value)}
        case.equal(f"thread {number}: what differs from training alone", apart, {})
