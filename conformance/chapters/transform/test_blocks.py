"""Check the blocks of layers whose memory and casts are predicted elsewhere under each transform, against backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, by_seed, contract
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import distance_of_chains, normwise_distance
from ...oracles.symbolic.blocks import PARTIAL, Block, every_block, execute, tensors
from ...oracles.trace.ops import OpTrace

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
BLOCKS = {name: block for name, block in every_block().items() if name not in PARTIAL}
# A batch of samples draws other numbers than each sample alone, and shares no running statistics.
ALONE = ("dropout", "batch_norm")
SAMPLES = 3
KINKS = 0.25
"""The normwise distance of gradients of which some are on another side of a kink."""

Inputs: TypeAlias = tuple[Tensor, ...]
Function: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Program:
    """A block as a function of its floating-point tensors, in a region of its own or in float32, at a point."""

    call: Function
    point: Inputs
    cotangent: Tensor
    tangents: Inputs
    limit: float
    """The normwise distance of two ways to round what it computes, forward and backward."""


def _program(block: Block, target: Target, dtype: torch.dtype, rng: torch.Generator) -> Program:
    named = {name: one.detach() for name, one in tensors(block, target.device, rng).items()}
    floating = [name for name, one in named.items() if one.is_floating_point()]

    def call(*given: Tensor) -> Tensor:
        with target.autocast(dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return execute(block, named | dict(zip(floating, given, strict=True)))

    point = tuple(named[name] for name in floating)
    torch.manual_seed(0)
    with OpTrace() as trace:
        leaves = _leaves(point)
        result = call(*leaves)
        torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    rounded = sum(any(each == dtype for each in op.outputs) for op in trace.ops)
    cotangent = torch.randn(result.shape, generator=rng).to(result)
    tangents = tuple(torch.randn(one.shape, generator=rng).to(one) for one in point)
    return Program(call, point, cotangent, tangents, distance_of_chains(dtype, rounded))


def _leaves(point: Inputs) -> Inputs:
    return tuple(one.detach().requires_grad_() for one in point)


def _backward(program: Program, point: Inputs, cotangent: Tensor) -> tuple[Tensor, Inputs]:
    """Return the result and the gradients of eager, zeros where there is none."""
    leaves = _leaves(point)
    torch.manual_seed(0)
    result = program.call(*leaves)
    found = torch.autograd.grad(result, leaves, cotangent, allow_unused=True)
    return result.detach(), _or_zeros(found, point)


def _or_zeros(found: Any, point: Inputs) -> Inputs:
    return tuple(torch.zeros_like(one) if each is None else each for each, one in zip(found, point, strict=True))


@dataclass(frozen=True)
class Pair:
    """What a transform gave, and what it is to be: tensors of the same types, and near in their normwise distance."""

    what: str
    seen: Sequence[Tensor]
    expected: Sequence[Tensor]
    limit: float
    typed: bool = True

    def judge(self, case: Case, dtype: torch.dtype) -> None:
        if self.typed:
            types = [[one.dtype for one in some] for some in (self.seen, self.expected)]
            case.equal(f"{dtype}, {self.what}: types", *types)
        sizes = [float(one.detach().cpu().abs().double().norm()) for one in self.expected]
        # What cancels, such as the gradient of the bias of a key, is as small as the roundings of the others.
        least = max(sizes, default=0.0) * torch.finfo(dtype).eps / 2
        far = [
            normwise_distance(one, other) * (min(1.0, size / least) if size else 1.0)
            for one, other, size in zip(self.seen, self.expected, sizes, strict=True)
        ]
        case.at_most(f"{dtype}, {self.what}: largest normwise distance", max(far, default=0.0), self.limit)


def _by_vjp(program: Program) -> Iterator[Pair]:
    result, gradients = _backward(program, program.point, program.cotangent)
    torch.manual_seed(0)
    seen, pull = torch.func.vjp(program.call, *program.point)
    yield Pair("result", [seen], [result], program.limit)
    yield Pair("gradients", pull(program.cotangent), gradients, program.limit)


def _by_several_cotangents(program: Program) -> Iterator[Pair]:
    """Take the rows of a Jacobian at once, by vmap and by is_grads_batched."""
    rows = torch.stack([program.cotangent, -2 * program.cotangent, program.cotangent.flip(0)])
    expected = [_backward(program, program.point, row)[1] for row in rows]
    wanted = [torch.stack(each) for each in zip(*expected, strict=True)]
    torch.manual_seed(0)
    pull = torch.func.vjp(program.call, *program.point)[1]
    yield Pair("by vmap of vjp", torch.func.vmap(pull)(rows), wanted, program.limit)
    leaves = _leaves(program.point)
    torch.manual_seed(0)
    result = program.call(*leaves)
    found = torch.autograd.grad(result, leaves, rows, allow_unused=True, is_grads_batched=True)
    zeros = tuple(torch.zeros_like(one) for one in wanted)
    yield Pair("is_grads_batched", _or_zeros(found, zeros), wanted, program.limit)


def _by_jvp(program: Program) -> Iterator[Pair]:
    """Take a tangent, whose product with a cotangent is that of the gradients with the tangents of the point."""
    result, gradients = _backward(program, program.point, program.cotangent)
    torch.manual_seed(0)
    seen, tangent = torch.func.jvp(program.call, program.point, program.tangents)
    yield Pair("result", [seen], [result], program.limit)
    forward, backward = _product([program.cotangent], [tangent]), _product(gradients, program.tangents)
    # Directions of variance 1 have the roundings of a tangent, or of gradients, in its norm, and both norms are alike.
    size = _product([tangent], [tangent]).sqrt() + _product(gradients, gradients).sqrt()
    yield Pair("tangent", [tangent], [tangent.to(result.dtype)], program.limit)
    one = torch.ones_like(size)
    yield Pair("products with the tangent", [one + (forward - backward) / size], [one], program.limit)


def _product(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the sum of the products of all elements, in float64 on the CPU."""
    wide = [[one.detach().cpu().double() for one in each] for each in (some, others)]
    return torch.stack([(one * other).sum() for one, other in zip(*wide, strict=True)]).sum()


def _by_vmap(program: Program) -> Iterator[Pair]:
    """Take samples of inputs and weights at once: results, and the gradients of each sample.

    vmap takes ops apart, whose parts autocast then casts, and which round elsewhere: AMP-TRANSFORM-003 judges the
    types, and gradients have a wide bound, as a rounding may move them to another side of a kink.
    """
    batch = tuple(torch.stack([one * (1 + part / 4) for part in range(SAMPLES)]) for one in program.point)
    samples = [_backward(program, tuple(one[part] for one in batch), program.cotangent) for part in range(SAMPLES)]
    results = torch.stack([result for result, _ in samples])
    gradients = [torch.stack(each) for each in zip(*(found for _, found in samples), strict=True)]
    yield Pair("results", [torch.func.vmap(program.call)(*batch)], [results], 2 * program.limit, typed=False)

    def gradient(*point: Tensor) -> Any:
        result, pull = torch.func.vjp(program.call, *point)
        return pull(program.cotangent.to(result.dtype))

    yield Pair("gradients", torch.func.vmap(gradient)(*batch), gradients, KINKS)


WAYS: dict[str, Callable[[Program], Iterator[Pair]]] = {
    "vjp": _by_vjp,
    "several-cotangents": _by_several_cotangents,
    "jvp": _by_jvp,
    "vmap": _by_vmap,
}


def _is_batched(block: Block) -> bool:
    return not any(step.op in ALONE for step in block.steps)


@contract("AMP-TRANSFORM-022")
@pytest.mark.parametrize(
    ("way", "name"),
    [
        by_seed("quick", 24, way, name, id=f"{way}-{name}")
        for way in WAYS
        for name, block in BLOCKS.items()
        if way != "vmap" or _is_batched(block)
    ],
)
def test_blocks(case: Case, target: Target, rng: torch.Generator, way: str, name: str) -> None:
    for dtype in case.supported(target):
        try:
            for pair in WAYS[way](_program(BLOCKS[name], target, dtype, rng)):
                pair.judge(case, dtype)
        except (NotImplementedError, RuntimeError):
            refused = _refused_outside(target, way, BLOCKS[name], rng)
            if refused is None:
                raise
            case.unsupported(f"outside of regions torch refuses this too: {refused}")


def _refused_outside(target: Target, way: str, block: Block, rng: torch.Generator) -> str | None:
    """Return what the transform of the block raises without a region, or None."""
    try:
        list(WAYS[way](_program(block, target, torch.float32, rng)))
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0][:80]
    return None
