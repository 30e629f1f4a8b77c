"""How many bytes a training step holds, from the start of its forward pass to the end of backward, on paper."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from ...oracles.symbolic.blocks import Block, work_through
from ...oracles.symbolic.tensors import Node, Paper, Value


@dataclass(frozen=True)
class StepBytes:
    """Bytes above those of weights, optimizer state and inputs, which live all along.

    `in_region` and `after_region` are alive at the end of the forward pass, before and after the region is left;
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
    """What an optimizer holds: `moments` tensors of state for each weight, `working` ones for the weight at hand.

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
    """A step whose gradients are dropped at its end; while the optimizer works, they and its `working` are alive."""
    step = step_bytes(block, device_type, amp_dtype)
    weights = [4 * math.prod(shape) for name, shape in block.parameters.items() if name not in block.frozen]
    updating = step.gradients + update.working * max(weights)
    return WholeStep(update.moments * sum(weights), max(step.low, step.gradients), max(step.high, updating))


def step_bytes(block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True) -> StepBytes:
    """Work out a forward pass in one region and its backward outside of it; gradients are made from nothing.

    Forward: what the program names, what nodes keep, and the copies in the region's cache are alive together. Backward
    goes through the nodes in the reverse of the order in which they were made (torch/csrc/autograd/engine.cpp: by
    sequence number), each frees what it kept and the gradient that it was given, and a gradient of a leaf stays. While
    a node runs, the gradients that it makes come on top, and one more of the largest of them, for a copy in another
    layout or the sum of two.
    """
    peak, made_before, ends = _Peak(), [0], {"in": 0, "out": 0}

    def after_step(paper: Paper, number: int, values: dict[str, Value]) -> None:
        held = {value.storage for value in values.values()} | set(paper.saved)
        alive = _sum(paper, held | {copy.storage for copy in paper.copies.values()})
        new = list(paper.made)[made_before[0] :]
        made_before[0] = len(paper.made)
        peak.between(alive)
        peak.during(_sum(paper, held | {copy.storage for copy in paper.copies.values()} | set(new)))
        if number == len(block.steps) - 1:
            ends["in"], ends["out"] = alive, _sum(paper, held)

    paper = work_through(block, device_type, amp_dtype, cache=cache, after_step=after_step)
    gradients = _backward(paper, peak, ends["out"])
    return StepBytes(ends["in"], ends["out"], gradients, peak.low, peak.high)


def _sum(paper: Paper, storages: set[str]) -> int:
    return sum(paper.made[storage].nbytes for storage in storages if storage in paper.made)


def _backward(paper: Paper, peak: _Peak, start: int) -> int:
    """Go backward through the nodes; the bytes of the leaves' gradients."""
    if not paper.nodes:
        return 0
    last = paper.nodes[-1].result
    result_alone = 0 if last.storage in paper.saved else paper.made[last.storage].nbytes
    users = Counter(storage for node in paper.nodes for storage in {value.storage for value in node.kept})
    kept = start - result_alone
    leaves: dict[str, int] = {}
    # The gradient of the result is made by the caller of backward and lives as long as it does.
    pending = {_key(last): last.nbytes}
    for node in reversed(paper.nodes):
        alive = kept + result_alone + sum(leaves.values()) + sum(pending.values())
        peak.between(alive)
        made = _gradients(node)
        peak.during(alive + sum(made) + max(made, default=0))
        given = pending.pop(_key(node.result), 0) if node is not paper.nodes[-1] else 0
        for number, value in enumerate(node.inputs):
            if value.leaf:
                leaves[value.storage] = value.nbytes
            elif not node.passes:
                pending[_key(value)] = value.nbytes
            elif number == 0 or value.dtype != node.result.dtype:
                # A gradient that is passed on is the same tensor for both inputs.
                pending[_key(value)] = max(given, pending.get(_key(value), 0))
        for storage in {value.storage for value in node.kept} & set(paper.made):
            users[storage] -= 1
            if users[storage] == 0 and storage != last.storage:
                kept -= paper.made[storage].nbytes
    peak.between(result_alone + sum(leaves.values()))
    return sum(leaves.values())


def _key(value: Value) -> tuple[str, tuple[int, ...], torch.dtype]:
    return value.storage, value.shape, value.dtype


def _gradients(node: Node) -> list[int]:
    return [value.nbytes for value in node.inputs]
