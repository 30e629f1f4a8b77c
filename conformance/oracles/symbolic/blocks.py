"""Predict what a block of operations saves for backward from the cast policy of each operation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...data import fixture, read_toml
from .op_rules import OPS
from .tensors import Saved, SymbolicRegion, Value

__all__ = ["Block", "Saved", "Step"]


@dataclass(frozen=True)
class Step:
    """One operation of a block: `out = op(*inputs, **options)`, inputs and out being names of tensors."""

    op: str
    inputs: tuple[str, ...]
    out: str
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A straight-line program over named tensors; `inputs` and `parameters` map names to shapes.

    `integers` maps inputs of class numbers, or of words, to how many there are; `frozen` names parameters without a
    gradient, and `differentiable` inputs with one.
    """

    name: str
    inputs: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]]
    steps: tuple[Step, ...]
    integers: dict[str, int] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()


def blocks(name: str = "blocks.toml") -> dict[str, Block]:
    """Return the blocks of `fixtures/blocks.toml`, or of another file of fixtures, by name."""
    return {row["name"]: _block(row) for row in read_toml(fixture(name))["block"]}


def chain(rows: int, width: int, layers: int) -> Block:
    """Return square Linear layers without bias, a ReLU between each two, and a mean: `rows` x `width` throughout."""
    steps = []
    for layer in range(layers):
        steps.append(Step("linear", (f"r{layer - 1}" if layer else "x", f"w{layer}"), f"h{layer}"))
        if layer < layers - 1:
            steps.append(Step("relu", (f"h{layer}",), f"r{layer}"))
    steps.append(Step("mean", (f"h{layers - 1}",), "loss"))
    weights: dict[str, tuple[int, ...]] = {f"w{layer}": (width, width) for layer in range(layers)}
    return Block("chain", {"x": (rows, width)}, weights, tuple(steps))


# Functions of one tensor, by what they keep: their input, their result, nothing, a mask.
UNARY = (
    *("relu", "gelu", "silu", "elu", "selu", "leaky_relu", "hardswish", "hardtanh", "softplus", "mish", "glu"),
    *("tanh", "sigmoid", "softmax", "log_softmax", "exp", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "square"),
    *("sin", "acos", "cosh", "abs", "cumsum", "dropout"),
)
PARTIAL = ("acos", "log1p", "reciprocal", "rsqrt", "sqrt")
"""Those that have no answer for the negative numbers of a layer, or a huge one near zero."""


def after_linear(op: str) -> Block:
    """`op` between two Linear layers, so that under autocast it is given a 16-bit activation and hands one on."""
    steps = (Step("linear", ("x", "w"), "h"), Step(op, ("h",), "g"), Step("linear", ("g", "v"), "y"))
    return Block(op, {"x": (15, 11)}, {"w": (16, 11), "v": (9, 8 if op == "glu" else 16)}, steps)


def every_block() -> dict[str, Block]:
    """Return the blocks of `fixtures/blocks.toml` and each function of one tensor between two layers, by name."""
    return blocks() | {op: after_linear(op) for op in UNARY}


def resized(block: Block, sizes: dict[int, int]) -> Block:
    """`block` with each dimension of inputs and parameters that `sizes` names in its new size."""

    def shapes(old: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sizes.get(size, size) for size in shape) for name, shape in old.items()}

    return replace(block, inputs=shapes(block.inputs), parameters=shapes(block.parameters))


def _block(row: dict[str, Any]) -> Block:
    return Block(
        row["name"],
        {name: tuple(shape) for name, shape in row["inputs"].items()},
        {name: tuple(shape) for name, shape in row["parameters"].items()},
        tuple(_step(line) for line in row["steps"]),
        row.get("integers", {}),
        tuple(row.get("frozen", ())),
        tuple(row.get("differentiable", ())),
    )


def _step(line: str) -> Step:
    out, _, op, *words = line.split()
    options = dict(word.split("=") for word in words if "=" in word)
    inputs = tuple(word for word in words if "=" not in word)
    return Step(op, inputs, out, {name: int(value) for name, value in options.items()})


def predict(block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True) -> list[Saved]:
    """Return the storages that `block` saves in one autocast region (`amp_dtype` None: outside any).

    From torch's AMP op reference (which op casts to what), the remark in aten/src/ATen/autocast_mode.h that casts
    come before autograd, so that backward keeps the cast tensors, and derivatives.yaml (what an op saves).
    """
    return list(evaluate(block, device_type, amp_dtype, cache=cache).saved.values())


def predict_casts(
    block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True
) -> tuple[int, int]:
    """Return how many casts `block` makes forward, and backward: one for each gradient of what was cast."""
    forward, backward = evaluate(block, device_type, amp_dtype, cache=cache).casts
    return forward, backward


def evaluate(
    block: Block,
    device_type: str,
    amp_dtype: torch.dtype | None,
    *,
    cache: bool = True,
    after_step: Callable[[SymbolicRegion, int, dict[str, Value]], None] = lambda region, number, values: None,
) -> SymbolicRegion:
    """Evaluate `block` symbolically; `after_step` gets the region and the named values after each of its steps.

    A value is dropped after its last use, as in `execute`.
    """
    region = SymbolicRegion(device_type, amp_dtype, cache)
    values: dict[str, Value] = {}
    for name, shape in block.inputs.items():
        dtype = torch.int64 if name in block.integers else torch.float32
        values[name] = Value(name, shape, dtype, name in block.differentiable, leaf="input")
    for name, shape in block.parameters.items():
        values[name] = Value(name, shape, torch.float32, name not in block.frozen, leaf="parameter")
    last = last_uses(block)
    for number, step in enumerate(block.steps):
        arguments = region.arguments(step.op, [values[name] for name in step.inputs])
        region.calls.append((step.op, tuple(arguments), step.options))
        values[step.out] = OPS[step.op].rule(region, *arguments, **step.options)
        drop(values, step.inputs, last, number)
        after_step(region, number, values)
    return region


def last_uses(block: Block) -> dict[str, int]:
    """Return the number of the step that uses each value last."""
    return {name: number for number, step in enumerate(block.steps) for name in step.inputs}


def drop(values: dict[str, Any], names: Collection[str], last: dict[str, int], number: int) -> None:
    """Forget those of `values` that nothing uses after the step with that number."""
    for name in names:
        if last[name] == number:
            values.pop(name, None)


def tensors(block: Block, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return leaves for `block`: fp32 inputs and parameters, drawn on the CPU so that every device gets the same."""
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in block.inputs.items():
        if name in block.integers:
            drawn[name] = torch.randint(0, block.integers[name], shape, generator=generator).to(device)
        else:
            drawn[name] = torch.randn(shape, generator=generator).to(device)
            drawn[name].requires_grad_(name in block.differentiable)
    for name, shape in block.parameters.items():
        drawn[name] = (torch.randn(shape, generator=generator) / 8).to(device)
        drawn[name].requires_grad_(name not in block.frozen)
    return drawn


def execute(block: Block, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run `block` on `leaves` through torch's public functions; the last step's result.

    An intermediate result is dropped after its last use, as it is where each overwrites the one before.
    """
    last = last_uses(block)
    values: dict[str, torch.Tensor] = dict(leaves)
    for number, step in enumerate(block.steps):
        values[step.out] = OPS[step.op].run(*(values[name] for name in step.inputs), **step.options)
        drop(values, step.inputs, last, number)
    return values[block.steps[-1].out]
