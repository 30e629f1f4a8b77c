"""Check the blocks of layers whose memory and casts are predicted elsewhere, in each way to run a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from ...oracles.symbolic.blocks import PARTIAL, Block, blocks, every_block, execute, resized, tensors
from .observation import copies, distances, observed
from .programs import Tensors
from .support import compiler, distance_of_ways, dtypes_of, inductor, near, same
from .ways import WAYS

BLOCKS = every_block()
DRAWN = {"make_fx": ("quick", 6), "export": ("quick", 2), "aot_eager": ("standard", 4)}
# Inductor, which takes seconds for each, compiles whole models, but those with numbers that it draws otherwise than
# eager.
MODELS = tuple(
    name
    for name, block in blocks().items()
    if not name.startswith(("op-", "tied-")) and all("dropout" not in step.op for step in block.steps)
)
FIRST = ("conv",)
# A rounding may carry a number over the kink of a relu, which changes the gradient: in four of ten draws of four
# batch norms, each with a relu, and in none of the others. What is wrong is wrong in each.
DRAWS = 12
FAR = 8.0  # what the results of blocks stay below


def _grows(block: Block) -> bool:
    """Whether the first inputs of a block have a number of rows that nothing else in it has."""
    rows = next(iter(block.inputs.values()))[0]
    shapes = [*block.parameters.values(), *(shape[1:] for shape in block.inputs.values())]
    return not any(rows in shape for shape in shapes) and all(shape[0] == rows for shape in block.inputs.values())


GROWING = {name: block for name, block in BLOCKS.items() if name not in PARTIAL and _grows(block)}


def _by_inductor() -> list[Any]:
    return [deep("standard", name) if name in FIRST else by_seed("standard", 1, name, id=name) for name in MODELS]


def _in_a_region(block: Block, names: tuple[str, ...], target: Target, dtype: torch.dtype) -> Callable[..., Any]:
    def call(*leaves: torch.Tensor) -> Any:
        with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
            return execute(block, dict(zip(names, leaves, strict=True)))

    return call


def _leaves(block: Block, target: Target, rng: torch.Generator) -> tuple[tuple[str, ...], Tensors]:
    named = tensors(block, target.device, rng)
    for step in block.steps:
        if step.op == "l1_loss":
            # Where a result equals its target the gradient jumps: a rounding that carries it over changes all of it.
            named[step.inputs[1]].detach().add_(FAR)
    return tuple(named), tuple(named.values())


@contract("AMP-COMPILE-075")
@pytest.mark.parametrize(
    "pair", [by_seed(*DRAWN[way], (way, name), id=f"{way}-{name}") for way in DRAWN for name in BLOCKS]
)
def test_blocks(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    way, name = WAYS[pair[0]], pair[1]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            names, leaves = _leaves(BLOCKS[name], target, rng)
            call = _in_a_region(BLOCKS[name], names, target, dtype)
            made = way.make(call, copies(leaves))
            torch.manual_seed(0)
            expected = observed(call, leaves)
            torch.manual_seed(0)
            seen = observed(made, leaves)
            if target.device_type == "cpu":
                same(case, f"{dtype}", seen, expected)
            else:  # where sums of gradients have no order of their own
                near(case, f"{dtype}", seen, expected, distance_of_ways(call, leaves))


@contract("AMP-COMPILE-075")
@needs("compiled kernels")
@pytest.mark.parametrize("name", _by_inductor())
def test_blocks_by_inductor(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    with compiler(case), inductor(case):
        for dtype in dtypes_of(case, target):
            names, leaves = _leaves(BLOCKS[name], target, rng)
            call = _in_a_region(BLOCKS[name], names, target, dtype)
            made = WAYS["inductor"].make(call, copies(leaves))
            for _ in range(DRAWS):
                seen, expected, limit = observed(made, leaves), observed(call, leaves), distance_of_ways(call, leaves)
                if max(distances(seen, expected).values()) <= limit:
                    break
                leaves = _leaves(BLOCKS[name], target, rng)[1]
            near(case, f"{dtype}", seen, expected, limit)


@contract("AMP-COMPILE-075")
@pytest.mark.parametrize("name", [by_seed("standard", 3, name, id=name) for name in GROWING])
def test_blocks_of_other_sizes(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    """The second size makes a graph for any size, by default; the first one is run again after it."""
    rows = next(iter(GROWING[name].inputs.values()))[0]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            made: Callable[..., Any] | None = None
            for size in (rows, 2 * rows + 1, 3 * rows + 2, rows):
                block = resized(GROWING[name], {rows: size})
                names, leaves = _leaves(block, target, rng)
                call = _in_a_region(block, names, target, dtype)
                made = made or torch.compile(call, backend="aot_eager", fullgraph=True)
                torch.manual_seed(0)
                expected = observed(call, leaves)
                torch.manual_seed(0)
                near(case, f"{dtype}, {size} rows", observed(made, leaves), expected, distance_of_ways(call, leaves))
