"""Predicted live bytes of a training step, from the start of its forward pass to the end of backward."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from ...oracles.symbolic.blocks import Block, evaluate
from ...oracles.symbolic.tensors import Node, SymbolicRegion, Value


@dataclass(frozen=True)
class StepBytes:
    """Bytes in addition to weights, optimizer state and inputs, which live throughout.

    `in_region` and `after_region` are alive at the end of the forward pass, before and after the region exits;
    `gradients` after backward. The peak lies between `low`, what is alive between two operations, and `high`, which
    adds what an operation may hold while it runs.
    """

    in_region: int
    after_region: int
    gradients: int
    low: int
    high: int


@dataclass
class _Peak:
    low: int = 0
    high: int = 0

    def between(self, alive: int) -> None:
        self.low = max(self.low, alive)
        self.high = max(self.high, alive)

    def during(self, alive: int) -> None:
        self.high = max(self.high, alive)


@dataclass(frozen=True)
class Update:
    """Memory of an optimizer: `moments` tensors of state for each weight, `working` temporaries for the current weight.

    The single-tensor forms (`foreach=False`), which go from weight to weight: SGD with momentum changes all in place;
    Adam makes the root of a second moment, and the same divided, while that of the weight before is still named
    (torch/optim/adam.py, _single_tensor_adam: denom).
    """

    moments: int
    working: int


UPDATES = {"momentum": Update(1, 0), "adam": Update(2, 3)}


@dataclass(frozen=True)
class WholeStep:
    """Bytes of a step with its optimizer: the state, which lives from the first step on, and the peak above it."""

    state: int
    low: int
    high: int


def whole_step(block: Block, device_type: str, amp_dtype: torch.dtype | None, update: Update) -> WholeStep:
    """Predict a step whose gradients are dropped at its end and alive, with `working`, during the optimizer's step."""
    step = step_bytes(block, device_type, amp_dtype)
    weights = [4 * math.prod(shape) for name, shape in block.parameters.items() if name not in block.frozen]
    updating = step.gradients + update.working * max(weights)
    return WholeStep(update.moments * sum(weights), max(step.low, step.gradients), max(step.high, updating))


def step_bytes(block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True) -> StepBytes:
    """Predict the bytes of a forward pass in one region and its backward outside of it; gradients are new storages.

    Forward: what the program names, what nodes keep, and the copies in the region's cache are alive together. Backward
    goes through the nodes in the reverse of the order in which they were made (torch/csrc/autograd/engine.cpp: by
    sequence number), each frees what it saved and the gradient that it was given, and a gradient of a leaf stays. While
    a node runs, the gradients that it makes come on top, and one more of the largest of them, for a copy in another
    layout or the sum of two.
    """
    peak, made_before, ends = _Peak(), [0], {"in": 0, "out": 0}

    def after_step(region: SymbolicRegion, number: int, values: dict[str, Value]) -> None:
        held = {value.storage for value in values.values()} | set(region.saved)
        alive = _sum(region, held | {copy.storage for copy in region.copies.values()})
        new = list(region.made)[made_before[0] :]
        made_before[0] = len(region.made)
        peak.between(alive)
        peak.during(_sum(region, held | {copy.storage for copy in region.copies.values()} | set(new)))
        if number == len(block.steps) - 1:
            ends["in"], ends["out"] = alive, _sum(region, held)

    region = evaluate(block, device_type, amp_dtype, cache=cache, after_step=after_step)
    gradients = _backward(region, peak, ends["out"])
    return StepBytes(ends["in"], ends["out"], gradients, peak.low, peak.high)


def _sum(region: SymbolicRegion, storages: set[str]) -> int:
    return sum(region.made[storage].nbytes for storage in storages if storage in region.made)


def _backward(region: SymbolicRegion, peak: _Peak, start: int) -> int:
    """Go backward through the nodes; return the bytes of the leaves' gradients."""
    if not region.nodes:
        return 0
    last = region.nodes[-1].result
    result_alone = 0 if last.storage in region.saved else region.made[last.storage].nbytes
    users = Counter(storage for node in region.nodes for storage in {value.storage for value in node.saved})
    saved = start - result_alone
    leaves: dict[str, int] = {}
    # The gradient of the result is made by the caller of backward and lives as long as it does.
    pending = {_key(last): last.nbytes}
    for node in reversed(region.nodes):
        alive = saved + result_alone + sum(leaves.values()) + sum(pending.values())
        peak.between(alive)
        made = _gradients(node)
        peak.during(alive + sum(made) + max(made, default=0))
        given = pending.pop(_key(node.result), 0) if node is not region.nodes[-1] else 0
        for number, value in enumerate(node.inputs):
            if value.leaf:
                leaves[value.storage] = value.nbytes
            elif not node.passes:
                pending[_key(value)] = value.nbytes
            elif number == 0 or value.dtype != node.result.dtype:
                # A gradient that is passed on is the same tensor for both inputs.
                pending[_key(value)] = max(given, pending.get(_key(value), 0))
        for storage in {value.storage for value in node.saved} & set(region.made):
            users[storage] -= 1
            if users[storage] == 0 and storage != last.storage:
                saved -= region.made[storage].nbytes
    peak.between(result_alone + sum(leaves.values()))
    return sum(leaves.values())


def _key(value: Value) -> tuple[str, tuple[int, ...], torch.dtype]:
    return value.storage, value.shape, value.dtype


def _gradients(node: Node) -> list[int]:
    return [value.nbytes for value in node.inputs]
