"""Check autocast's weight cache on a GPU: in CUDA graphs and across streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.exact import product
from ...oracles.numbers.formats import FORMATS, Format, rounded
from ...oracles.trace.ops import OpTrace
from ...workloads.graphs import recorded, warmed

ROWS, WIDTH = 4, 8
CYCLES = 10_000_000


class Layers:
    """Two matrices whose 16-bit casts are visible: odd integers plus a fraction that rounding removes.

    Inputs are integers, so that a product of rounded numbers has only the one rounding of its result.
    """

    def __init__(self, device: torch.device, rng: torch.Generator) -> None:
        self._rng = rng
        self.weights = [torch.empty(WIDTH, WIDTH, device=device, requires_grad=True) for _ in range(2)]
        self.inputs, self.seed = (torch.empty(ROWS, WIDTH, device=device) for _ in range(2))
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Write new values to the same memory."""
        for weight in self.weights:
            weight.copy_(2 * torch.randint(-4, 4, weight.shape, generator=self._rng) + 1 + 2.0**-13)
        for tensor in (self.inputs, self.seed):
            tensor.copy_(torch.randint(-3, 4, tensor.shape, generator=self._rng))

    def first(self, inputs: Tensor) -> Tensor:
        return torch.mm(inputs, self.weights[0])

    def second(self, between: Tensor) -> Tensor:
        return torch.mm(between, self.weights[1])

    def backward(self, *outputs: Tensor) -> Tensor:
        """Return the gradient of the first matrix, of all outputs together."""
        (gradient,) = torch.autograd.grad(outputs, self.weights[0], [self.seed.to(each.dtype) for each in outputs])
        return gradient

    def expected(self, form: Format) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of the first layer, that of both, and the gradient of the first matrix at its result."""
        inputs, seed = (tensor.cpu().double() for tensor in (self.inputs, self.seed))
        casts = [rounded(weight.detach().cpu().double(), form) for weight in self.weights]
        between = rounded(product(inputs, casts[0]), form)
        return between, rounded(product(between, casts[1]), form), rounded(product(inputs.mT, seed), form)


def same(case: Case, what: str, seen: Tensor, expected: Tensor) -> None:
    case.identical(what, seen.detach().cpu().double(), expected)


# Graphs

Within = Callable[[], AbstractContextManager[object]]


@contract("AMP-CACHE-053", on="cuda")
@needs("graphs")
@pytest.mark.parametrize("place", ["inside", "inside-cached", "around"])
def test_replays_cast_again(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str
) -> None:
    layers, form, held = Layers(target.device, rng), FORMATS[amp_dtype], {}

    def region(*, cache: bool) -> AbstractContextManager[object]:
        return target.autocast(amp_dtype, cache_enabled=cache)

    inside = region if place != "around" else (lambda *, cache: nullcontext())

    def work() -> None:
        with inside(cache=place == "inside-cached"):
            held["between"] = layers.first(layers.inputs)
            held["again"] = layers.first(layers.inputs)  # with a cache, by the cast of the first use
        held["gradient"] = layers.backward(held["between"])

    with full_precision("cuda"), region(cache=False) if place == "around" else nullcontext():
        warmed(work)
        replay = recorded(work).replay
        for number in range(1, 4):
            layers.draw()
            replay()
            between, _, gradient = layers.expected(form)
            case.equal(f"dtype after replay {number}", held["between"].dtype, amp_dtype)
            same(case, f"result after replay {number}", held["between"], between)
            same(case, f"result of the second use after replay {number}", held["again"], between)
            same(case, f"gradient after replay {number}", held["gradient"], gradient)
    layers.draw()
    with full_precision("cuda"), target.autocast(amp_dtype):
        same(case, "result of an eager region afterwards", layers.first(layers.inputs), layers.expected(form)[0])


@contract("AMP-CACHE-054", on="cuda")
@needs("graphs")
def test_graphed_callables(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    layers, form = Layers(target.device, rng), FORMATS[amp_dtype]
    module = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=target.device)
    sample = (torch.zeros(ROWS, WIDTH, device=target.device),)
    with full_precision("cuda"), target.autocast(amp_dtype, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(module, sample)
        for number in range(1, 4):
            layers.draw()
            with torch.no_grad():
                module.weight.copy_(layers.weights[0].mT)
            module.weight.grad = None
            output = graphed(layers.inputs)
            output.backward(layers.seed.to(output.dtype))
            between, _, gradient = layers.expected(form)
            case.equal(f"dtype of call {number}", output.dtype, amp_dtype)
            same(case, f"result of call {number}", output, between)
            case.true(f"the weight has a gradient after call {number}", module.weight.grad is not None)
            assert module.weight.grad is not None
            case.equal(f"dtype of its gradient after call {number}", module.weight.grad.dtype, torch.float32)
            same(case, f"its gradient after call {number}", module.weight.grad, gradient.mT)


@contract("AMP-CACHE-055", on="cuda")
@needs("graphs", "pools of memory")
@pytest.mark.parametrize("shared", [True, False], ids=["one-pool", "two-pools"])
def test_private_pools(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, shared: bool) -> None:
    layers, form, held = Layers(target.device, rng), FORMATS[amp_dtype], {}

    def first() -> None:
        with target.autocast(amp_dtype):
            held["between"] = layers.first(layers.inputs)

    def second() -> None:
        with target.autocast(amp_dtype):
            held["output"] = layers.second(held["between"])

    with full_precision("cuda"), torch.no_grad():
        for work in (first, second):
            warmed(work)
        graphs = [recorded(first)]
        graphs.append(recorded(second, shared=graphs[0] if shared else None))
        for number in range(1, 4):
            layers.draw()
            graphs[0].replay()
            # Allocations in between must use other memory than the graphs'.
            others = [torch.full((ROWS, WIDTH), torch.nan, device=target.device, dtype=amp_dtype) for _ in range(64)]
            graphs[1].replay()
            between, output, _ = layers.expected(form)
            same(case, f"result of the first graph, replay {number}", held["between"], between)
            same(case, f"result of the second graph, replay {number}", held["output"], output)
            left = sum(bool(other.isnan().all()) for other in others)
            case.equal(f"tensors allocated meanwhile that are as they were, replay {number}", left, len(others))


# Streams


def occupy(module: Any) -> None:
    """Keep the current stream busy for some milliseconds, so that work without synchronization runs too early."""
    sleep = getattr(module, "_sleep", None)  # CUDA's and ROCm's alone: a kernel that counts cycles
    if sleep is not None:
        sleep(CYCLES)


@contract("AMP-CACHE-056", on="accelerator")
@needs("streams")
def test_casts_over_streams(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    module: Any = torch.get_device_module(target.device_type)
    layers, form, rounds = Layers(target.device, rng), FORMATS[amp_dtype], 3
    with target.current(), full_precision(target.device_type):
        casting, using = module.Stream(), module.Stream()
        for number in range(1, rounds + 1):
            layers.draw()
            with target.autocast(amp_dtype), OpTrace() as trace:
                casting.wait_stream(module.current_stream())
                with module.stream(casting):
                    occupy(module)
                    seen = {"the stream of the cast": layers.first(layers.inputs)}
                using.wait_stream(casting)
                with module.stream(using):
                    seen["the second stream"] = layers.first(layers.inputs)
                module.current_stream().wait_stream(using)
                seen["the current stream"] = layers.first(layers.inputs)
            between, _, gradient = layers.expected(form)
            case.equal(f"casts of the weight in round {number}", len(trace.casts_of(layers.weights[0])), 1)
            for stream, result in seen.items():
                same(case, f"result on {stream}, round {number}", result, between)
            same(case, f"gradient of all three, round {number}", layers.backward(*seen.values()), 3 * gradient)
