"""What a block of operations saves for backward, worked out on paper from the cast policy of each operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.data import fixture, read_toml

LOW, FP32, KEEP = "lower precision", "fp32", "input's own"

# torch's AMP op reference: the CUDA list (shared by the other accelerators) and, where it differs, the CPU list.
_POLICY = {
    "linear": LOW,
    "conv2d": LOW,
    "matmul": LOW,
    "relu": KEEP,
    "gelu": KEEP,
    "max_pool2d": KEEP,
    "softmax": FP32,
    "mse_loss": FP32,
    "cross_entropy": KEEP,
    "flatten": KEEP,
    "transpose": KEEP,
}
_POLICY_CPU = {"softmax": KEEP, "cross_entropy": FP32}


@dataclass(frozen=True)
class Step:
    """One operation of a block: `out = op(*inputs)`, all of them names of tensors."""

    op: str
    inputs: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class Block:
    """A straight-line program over named tensors; `inputs` and `parameters` map names to shapes.

    `labels` names an input of class numbers, `classes` of them; `frozen` names parameters without a gradient, and
    `differentiable` inputs with one.
    """

    name: str
    inputs: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]]
    steps: tuple[Step, ...]
    classes: int = 0
    frozen: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """One storage that backward needs; role is `activation`, `weight copy` or `input copy`."""

    role: str
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class _Value:
    """A tensor on paper: `storage` is shared by views, `leaf` is its role when it came from outside."""

    storage: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    leaf: str = ""
    role: str = "activation"

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class _Paper:
    """One autocast region worked through by hand: which casts it makes, and what it saves."""

    def __init__(self, device_type: str, amp_dtype: torch.dtype | None, cache: bool) -> None:
        self.policy = _POLICY | (_POLICY_CPU if device_type == "cpu" else {})
        self.amp_dtype = amp_dtype
        self.cache = cache
        self.copies: dict[str, _Value] = {}
        self.saved: dict[str, Saved] = {}
        self.casts = [0, 0]
        self.fresh = 0

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, grad: bool, role: str = "activation") -> _Value:
        self.fresh += 1
        return _Value(f"#{self.fresh}", shape, dtype, grad, role=role)

    def keep(self, value: _Value) -> None:
        """Save `value`, unless it lives outside the graph anyway (parameters and inputs)."""
        if not value.leaf:
            self.saved[value.storage] = Saved(value.role, value.dtype, value.elements)

    def cast(self, value: _Value, dtype: torch.dtype) -> _Value:
        """A copy in `dtype`; the cache serves fp32 leaves that require a gradient, and nothing else."""
        if value.dtype == dtype or not value.dtype.is_floating_point:
            return value
        cacheable = self.cache and bool(value.leaf) and value.grad and dtype == self.amp_dtype
        if cacheable and value.storage in self.copies:
            return self.copies[value.storage]
        role = {"parameter": "weight copy", "input": "input copy"}.get(value.leaf, "activation")
        copy = self.new(value.shape, dtype, value.grad, role)
        self.casts[0] += 1
        self.casts[1] += value.grad
        if cacheable:
            self.copies[value.storage] = copy
        return copy

    def arguments(self, op: str, values: list[_Value]) -> list[_Value]:
        policy = self.policy[op]
        if self.amp_dtype is None or policy == KEEP:
            return values
        return [self.cast(value, self.amp_dtype if policy == LOW else torch.float32) for value in values]


def _linear(paper: _Paper, x: _Value, weight: _Value, bias: _Value | None = None) -> _Value:
    # derivatives.yaml, addmm and mm: each factor is kept for the other one's gradient.
    if weight.grad:
        paper.keep(x)
    if x.grad:
        paper.keep(weight)
    return paper.new((*x.shape[:-1], weight.shape[0]), x.dtype, x.grad or weight.grad)


def _matmul(paper: _Paper, a: _Value, b: _Value) -> _Value:
    if b.grad:
        paper.keep(a)
    if a.grad:
        paper.keep(b)
    return paper.new((*a.shape[:-1], b.shape[-1]), a.dtype, a.grad or b.grad)


def _conv2d(paper: _Paper, x: _Value, weight: _Value, bias: _Value | None = None) -> _Value:
    # derivatives.yaml, convolution: one formula for all three gradients, so input and weight are always kept.
    paper.keep(x)
    paper.keep(weight)
    height, width = (x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1)
    return paper.new((x.shape[0], weight.shape[0], height, width), x.dtype, True)


def _saves_result(paper: _Paper, x: _Value) -> _Value:
    result = paper.new(x.shape, x.dtype, x.grad)
    paper.keep(result)
    return result


def _saves_input(paper: _Paper, x: _Value) -> _Value:
    paper.keep(x)
    return paper.new(x.shape, x.dtype, x.grad)


def _max_pool2d(paper: _Paper, x: _Value) -> _Value:
    shape = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
    paper.keep(x)
    paper.keep(paper.new(shape, torch.int64, False))
    return paper.new(shape, x.dtype, x.grad)


def _mse_loss(paper: _Paper, x: _Value, target: _Value) -> _Value:
    paper.keep(x)
    paper.keep(target)
    return paper.new((), x.dtype, x.grad)


def _cross_entropy(paper: _Paper, x: _Value, target: _Value) -> _Value:
    # log_softmax keeps its result, in the type of the logits (aten/src/ATen/native/LossNLL.cpp asks for that one);
    # nll_loss, on every fp32 list, keeps it in fp32 and the total weight, one number.
    chances = paper.new(x.shape, x.dtype, x.grad)
    paper.keep(chances)
    terms = chances if paper.amp_dtype is None else paper.cast(chances, torch.float32)
    paper.keep(terms)
    paper.keep(paper.new((), terms.dtype, False))
    return paper.new((), terms.dtype, x.grad)


def _flatten(paper: _Paper, x: _Value) -> _Value:
    return replace(x, shape=(x.shape[0], x.elements // x.shape[0]))


def _transpose(paper: _Paper, x: _Value) -> _Value:
    return replace(x, shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]))


_RULES: dict[str, Callable[..., _Value]] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "matmul": _matmul,
    "relu": _saves_result,
    "softmax": _saves_result,
    "gelu": _saves_input,
    "max_pool2d": _max_pool2d,
    "mse_loss": _mse_loss,
    "cross_entropy": _cross_entropy,
    "flatten": _flatten,
    "transpose": _transpose,
}

_RUN: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda *tensors: torch.nn.functional.linear(*tensors),
    "conv2d": lambda *tensors: torch.nn.functional.conv2d(*tensors),
    "matmul": lambda a, b: torch.matmul(a, b),
    "relu": lambda x: torch.nn.functional.relu(x),
    "softmax": lambda x: torch.softmax(x, -1),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "max_pool2d": lambda x: torch.nn.functional.max_pool2d(x, 2),
    "mse_loss": lambda x, target: torch.nn.functional.mse_loss(x, target),
    "cross_entropy": lambda x, target: torch.nn.functional.cross_entropy(x, target),
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.transpose(-2, -1),
}


def blocks() -> dict[str, Block]:
    """The blocks of `fixtures/blocks.toml` by name."""
    return {row["name"]: _block(row) for row in read_toml(fixture("blocks.toml"))["block"]}


def chain(rows: int, width: int, layers: int) -> Block:
    """Square Linear layers without bias and a ReLU between each two: `rows` x `width` throughout."""
    steps = []
    for layer in range(layers):
        steps.append(Step("linear", (f"r{layer - 1}" if layer else "x", f"w{layer}"), f"h{layer}"))
        if layer < layers - 1:
            steps.append(Step("relu", (f"h{layer}",), f"r{layer}"))
    weights: dict[str, tuple[int, ...]] = {f"w{layer}": (width, width) for layer in range(layers)}
    return Block("chain", {"x": (rows, width)}, weights, tuple(steps))


def _block(row: dict[str, Any]) -> Block:
    lines = [line.split() for line in row["steps"]]
    return Block(
        row["name"],
        {name: tuple(shape) for name, shape in row["inputs"].items()},
        {name: tuple(shape) for name, shape in row["parameters"].items()},
        tuple(Step(op, tuple(inputs), out) for out, _, op, *inputs in lines),
        row.get("classes", 0),
        tuple(row.get("frozen", ())),
        tuple(row.get("differentiable", ())),
    )


def predict(block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True) -> list[Saved]:
    """The storages that `block` saves in one autocast region (`amp_dtype` None: outside any).

    From torch's AMP op reference (which op casts to what), the remark in aten/src/ATen/autocast_mode.h that casts
    come before autograd, so that backward keeps the cast tensors, and derivatives.yaml (what an op keeps).
    """
    return list(_work_through(block, device_type, amp_dtype, cache).saved.values())


def predict_casts(
    block: Block, device_type: str, amp_dtype: torch.dtype | None, *, cache: bool = True
) -> tuple[int, int]:
    """How many casts `block` makes forward, and backward: one for each gradient of what was cast."""
    forward, backward = _work_through(block, device_type, amp_dtype, cache).casts
    return forward, backward


def _work_through(block: Block, device_type: str, amp_dtype: torch.dtype | None, cache: bool) -> _Paper:
    paper = _Paper(device_type, amp_dtype, cache)
    values: dict[str, _Value] = {}
    for name, shape in block.inputs.items():
        dtype = torch.int64 if block.classes and name == "labels" else torch.float32
        values[name] = _Value(name, shape, dtype, name in block.differentiable, leaf="input")
    for name, shape in block.parameters.items():
        values[name] = _Value(name, shape, torch.float32, name not in block.frozen, leaf="parameter")
    for step in block.steps:
        arguments = paper.arguments(step.op, [values[name] for name in step.inputs])
        values[step.out] = _RULES[step.op](paper, *arguments)
    return paper


def tensors(block: Block, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Leaves for `block`: fp32 inputs and parameters, drawn on the CPU so that every device gets the same."""
    drawn: dict[str, torch.Tensor] = {}
    for name, shape in block.inputs.items():
        if block.classes and name == "labels":
            drawn[name] = torch.randint(0, block.classes, shape, generator=generator).to(device)
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
    last_use = {name: number for number, step in enumerate(block.steps) for name in step.inputs}
    values: dict[str, torch.Tensor] = dict(leaves)
    for number, step in enumerate(block.steps):
        values[step.out] = _RUN[step.op](*(values[name] for name in step.inputs))
        for name in step.inputs:
            if last_use[name] == number:
                values.pop(name, None)
    return values[block.steps[-1].out]
