"""Check random programs of regions, custom functions, checkpoints and residuals against exact gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from ...oracles.shrinking import shortest
from . import random_programs as programs
from .random_programs import KEPT, Instruction, Program
from .support import decorated

SCALE = 2.0**6
Tensors = Mapping[str, torch.Tensor]


class Machine:
    """Run programs under torch.amp on one target in regions of one dtype."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        kind = {"device_type": target.device_type}
        backward = torch.amp.custom_bwd(**kind)
        self._target, self._dtype = target, dtype
        self._follows = decorated(torch.amp.custom_fwd(**kind), backward)
        self._needs_float32 = decorated(torch.amp.custom_fwd(**kind, cast_inputs=torch.float32), backward)

    def forward(self, program: Program, leaves: Tensors) -> tuple[torch.Tensor, list[torch.dtype]]:
        """Return the scaled loss of a program, and the dtypes of its steps."""
        current = saved = leaves["x"]
        types = []
        with self._target.autocast(self._dtype):
            for step in program:
                if step.kind == "save":
                    saved = current
                elif step.kind == "residual":
                    current = current + saved
                else:
                    current = self._stepped(step, current, leaves)
                types.append(current.dtype)
            loss = (current.float() * leaves["goal"]).sum()
        return loss * SCALE, types

    def _stepped(self, step: Instruction, x: torch.Tensor, leaves: Tensors) -> torch.Tensor:
        weight = leaves[step.weight]
        ways: dict[str, Callable[[], Any]] = {
            "linear": lambda: functional.linear(x, weight),
            "mm": lambda: torch.mm(x, weight),
            "custom": lambda: self._follows.apply(x, leaves[KEPT]),
            "custom float32": lambda: self._needs_float32.apply(x, weight),
            "island": lambda: self._inside(x.float(), weight, enabled=False),
            "nested": lambda: self._inside(x, weight, cache_enabled=False),
            "checkpoint": lambda: checkpoint(functional.linear, x, weight, use_reentrant=False),
            "checkpoint, reentrant": lambda: checkpoint(functional.linear, x, leaves[KEPT], use_reentrant=True),
            "relu": lambda: functional.relu(x),
            "transpose": lambda: x.t(),
            "float": lambda: x.float(),
            "halves": lambda: torch.cat([x[2:], x[:2]]),
        }
        result: torch.Tensor = ways[step.kind]()
        return result

    def _inside(self, x: torch.Tensor, weight: torch.Tensor, **options: bool) -> torch.Tensor:
        with self._target.autocast(self._dtype, **options):
            return functional.linear(x, weight)


def accumulated(loss: torch.Tensor, leaves: Tensors, target: Target, dtype: torch.dtype) -> None:
    loss.backward()


def in_a_disabled_region(loss: torch.Tensor, leaves: Tensors, target: Target, dtype: torch.dtype) -> None:
    with target.autocast(OTHER[dtype], enabled=False):
        loss.backward()


def in_a_thread(loss: torch.Tensor, leaves: Tensors, target: Target, dtype: torch.dtype) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


BACKWARDS = (accumulated, in_a_disabled_region, in_a_thread)


def wrong(machine: Machine, program: Program, target: Target, dtype: torch.dtype, seed: int) -> list[str]:
    """Return the differences of a program's run from its exact gradients and promised dtypes."""
    given = programs.leaves(torch.Generator().manual_seed(seed))
    promised = programs.exact(program, given, dtype)
    leaves = {name: tensor.to(target.device).requires_grad_(name != "goal") for name, tensor in given.items()}
    try:
        loss, types = machine.forward(program, leaves)
        BACKWARDS[len(program) % len(BACKWARDS)](loss, leaves, target, dtype)
    except RuntimeError as error:
        return [f"raised {error}"]
    found = [
        f"step {number} ({step}) is {seen}, not {type_}"
        for number, (step, seen, type_) in enumerate(zip(program, types, promised.types, strict=True))
        if seen != type_
    ]
    for name, gradient in promised.gradients.items():
        grad = leaves[name].grad
        seen = torch.zeros_like(leaves[name]) if grad is None else grad
        if seen.dtype != torch.float32:
            found.append(f"the gradient of {name} is {seen.dtype}")
        if not torch.equal(seen.cpu().double(), gradient * SCALE):
            found.append(f"the gradient of {name} differs")
    return found


@contract("AMP-BACKWARD-064")
def test_random_programs(case: Case, target: Target) -> None:
    count = case.samples(quick=15, standard=300, full=3000)
    for dtype in case.supported(target):
        machine = Machine(target, dtype)
        differs = functools.partial(wrong, machine, target=target, dtype=dtype, seed=case.seed)

        def fails(program: Program, differs: Callable[[Program], list[str]] = differs) -> bool:
            return bool(differs(program))

        failed = shortest(programs.random_program, fails, count=count, seed=case.seed, simpler=programs.simpler)
        report: list[str] = []
        if failed is not None:
            report = [*map(str, failed), f"backward {BACKWARDS[len(failed) % 3].__name__}", *differs(failed)]
        case.equal(f"{dtype}: the shortest program that fails, and how", report, [])
    case.note("programs", count)
