"""Check compiled programs that write to an argument, called with arguments that share memory, or do not, in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiling, dtypes_of

Arguments = tuple[Tensor, Tensor]

ARGUMENTS: Mapping[str, Callable[[Tensor], Arguments]] = {
    "apart": lambda base: (base[:4], base[4:].clone()),
    "halves": lambda base: (base[:4], base[4:]),
    "same": lambda base: (base[:4], base[:4]),
    "overlapping": lambda base: (base[:4], base[2:6]),
    "transposed": lambda base: (base[:4], base[:4].t()),
}
"""Two matrices made from one of eight rows: what is written to the first is seen in the second, or is not."""
PAIRS = tuple(itertools.permutations(ARGUMENTS, 2))
SHOWN = ("apart-transposed", "transposed-halves", "apart-halves")


def _program(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=dtype, cache_enabled=False):
            x.add_(1)
            return torch.mm(x, y)

    return program


def _called(call: Callable[[Tensor, Tensor], Tensor], name: str, base: Tensor) -> list[str]:
    """Return what a call gives, and what it leaves in the memory of its first argument, or its error."""
    memory = base.clone()
    try:
        result = call(*ARGUMENTS[name](memory))
    except Exception as error:
        return [f"raises {type(error).__name__}"]
    return [str(one.tolist()) for one in (result, memory)]


@contract("AMP-COMPILE-099")
@pytest.mark.parametrize(
    "pair", [deep("quick" if "-".join(pair) in SHOWN else "standard", pair, id="-".join(pair)) for pair in PAIRS]
)
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
def test_arguments_that_share_memory(
    case: Case, target: Target, rng: torch.Generator, backend: str, pair: tuple[str, str]
) -> None:
    base = torch.randint(-2, 3, (8, 4), generator=rng).float().to(target.device)
    first, second = pair
    for dtype in dtypes_of(case, target):
        program = _program(dtype)
        with compiling(case, backend):
            call = torch.compile(program, backend=backend)
            for turn, name in (("first", first), ("second", second), ("third", first)):
                what = f"{dtype}: {turn} call, arguments {name}"
                case.equal(what, _called(call, name, base), _called(program, name, base))
