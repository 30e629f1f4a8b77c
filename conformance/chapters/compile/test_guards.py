"""Check that a program that is compiled again for another reason still follows the autocast state around each call."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiler, graphs

WIDTH = 4


class _Scaled(torch.nn.Module):
    """A linear layer whose result also depends on an attribute, and on each part of the autocast state."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = functional.linear(x, self.weight) * self.scale
        # A graph of the backend eager casts in the region that it is called in: only answers to questions are fixed.
        kind = self.weight.device.type
        told = self.weight + 1 if torch.is_autocast_enabled(kind) else self.weight - 1
        told = told * 2 if torch.is_autocast_cache_enabled() else told * 3
        return h, told.to(torch.get_autocast_dtype(kind))


@dataclass(frozen=True)
class _Call:
    """What Dynamo compiles a program again for: the number of rows, the layout, gradients, an attribute, grad mode."""

    rows: int = 3
    transposed: bool = False
    differentiable: bool = False
    scale: float = 2.0
    trained: bool = True
    grad: bool = True

    def __call__(self, program: Callable[..., Any], module: _Scaled) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.arange(self.rows * WIDTH, device=module.weight.device, dtype=torch.float32).div(16).sin()
        x = numbers.view(WIDTH, self.rows).t() if self.transposed else numbers.view(self.rows, WIDTH)
        module.scale = self.scale
        module.weight.requires_grad_(self.trained)
        with torch.set_grad_enabled(self.grad):
            result, told = program(x.requires_grad_(self.differentiable))
            return result, told


FIRST = _Call()
REASONS: Mapping[str, Sequence[_Call]] = {
    # The second number of rows becomes a symbol of the graph, which then serves each number.
    "rows": [replace(FIRST, rows=rows) for rows in (3, 5, 6, 7, 8)],
    "requires_grad": [replace(FIRST, differentiable=True)],
    "stride": [replace(FIRST, transposed=True)],
    "attribute": [replace(FIRST, scale=3.0)],
    "requires_grad of a weight": [replace(FIRST, trained=False)],
    "grad mode": [replace(FIRST, grad=False)],
}


AT_QUICK = ("rows", "requires_grad")


def states(target: Target) -> dict[str, Callable[[], torch.autocast]]:
    """Return autocast states around a call by name; two that follow one another differ."""

    def region(dtype: torch.dtype, **options: bool) -> Callable[[], torch.autocast]:
        return lambda: torch.autocast(target.device_type, dtype=dtype, **options)

    return {
        "a region of bf16": region(torch.bfloat16, cache_enabled=False),
        "a region of fp16": region(torch.float16, cache_enabled=False),
        "a region of bf16 with the cache on": region(torch.bfloat16, cache_enabled=True),
        "a disabled region": region(torch.bfloat16, enabled=False, cache_enabled=False),
    }


def follows(
    case: Case, target: Target, backend: str, calls: Sequence[tuple[str, _Call]], dynamic: bool | None = None
) -> None:
    """Make the calls, each in its state, compiled and in eager, and compare what they return."""
    weight = torch.arange(WIDTH * WIDTH, device=target.device).view(WIDTH, WIDTH).cos()
    module, opened = _Scaled(weight), states(target)
    torch._dynamo.reset()
    before = graphs()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for number, (state, call) in enumerate(calls):
        with opened[state]():
            seen, expected = call(compiled, module), call(module, module)
        what = f"call {number}, {call}, in {state}"
        for name, ours, theirs in zip(("result", "autocast state"), seen, expected, strict=True):
            case.identical(f"{what}: {name}", ours.detach(), theirs.detach())
        case.equal(f"{what}: requires_grad", seen[0].requires_grad, expected[0].requires_grad)
    case.at_least("graphs compiled (control)", graphs() - before, 2)
    case.at_least("autocast states (control)", len({state for state, _ in calls}), 2)


def in_turn(reason: str, target: Target) -> list[tuple[str, _Call]]:
    """Return calls that compile for the reason in the first state, and then the same in each other state."""
    first, *others = states(target)
    again = REASONS[reason]
    if reason == "rows":
        return [(first, again[0]), (first, again[1]), *zip(others, again[2:], strict=True)]
    return [(first, FIRST), (first, again[0]), *((state, again[0]) for state in others)]


@contract("AMP-COMPILE-071")
@pytest.mark.parametrize("backend", ["eager", deep("full", "aot_eager")])
@pytest.mark.parametrize("reason", [name if name in AT_QUICK else deep("standard", name) for name in REASONS])
def test_compiled_again(case: Case, target: Target, reason: str, backend: str) -> None:
    case.require(target, torch.float16, torch.bfloat16)
    with compiler(case):
        follows(case, target, backend, in_turn(reason, target))


LENGTH = 12


@contract("AMP-COMPILE-071")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("full", "aot_eager")])
@pytest.mark.parametrize("sizes", ["automatic", "static", "dynamic"])
def test_sequences(case: Case, target: Target, sizes: str, backend: str) -> None:
    """A sequence of calls in which the reason and the state change by the seed."""
    case.require(target, torch.float16, torch.bfloat16)
    chosen = random.Random(f"{case.seed} {sizes}")
    calls = [call for each in REASONS.values() for call in each]
    names = tuple(states(target))
    # Of few of each, so that graphs are used again before Dynamo's limit of graphs is reached.
    some, two = [*chosen.sample(calls, 3), *REASONS["rows"][2:]], chosen.sample(names, 2)
    sequence = [(chosen.choice(two), chosen.choice(some)) for _ in range(LENGTH)]
    sequence += [(state, call) for call in some[-2:] for state in two]
    with compiler(case):
        follows(case, target, backend, sequence, {"automatic": None, "static": False, "dynamic": True}[sizes])
