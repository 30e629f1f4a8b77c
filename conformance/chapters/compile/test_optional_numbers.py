"""Check ops with arguments that are not the default, decomposed for a compiler and in an exported program."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .decomposed_ops import allowed, error, results
from .optional_numbers import OPS, REDUCTIONS, every, operand
from .support import compiler, dtypes_of
from .ways import WAYS

SOME = 6  # of the ops, at quick


def _chosen(case: Case, rng: torch.Generator, parts: int) -> list[str]:
    """Return ops that the seed chooses: all at full, else each loss with one reduction, and a part of these."""
    names = list(OPS)
    if case.level == "full":
        return names
    start = int(torch.randint(len(REDUCTIONS), (), generator=rng))
    of_losses = [name for name in names if name.endswith(REDUCTIONS)]
    once = [name for at, name in enumerate(of_losses) if at % len(REDUCTIONS) == (at // len(REDUCTIONS) + start) % 3]
    names = [name for name in names if name not in of_losses or name in once]
    count = SOME if case.level == "quick" else len(names) // parts
    return [names[at] for at in torch.randperm(len(names), generator=rng)[:count].tolist()]


def _taken(names: Iterable[str], x: Tensor, *, gradients: bool) -> tuple[str, ...]:
    """Return the ops that run in eager, with their gradients where these are asked for: some have no 16-bit kernel."""
    found = []
    for name in names:
        run = functools.partial(every, (name,))
        try:
            results([name], run, x) if gradients else run(x)
        except (RuntimeError, NotImplementedError):
            continue
        found.append(name)
    return tuple(found)


@contract("AMP-COMPILE-004")
def test_decomposed_options(case: Case, target: Target, rng: torch.Generator) -> None:
    """Outputs and gradients, in graphs that AOTAutograd takes apart."""
    for dtype in dtypes_of(case, target):
        x = operand(dtype, target.device, rng)
        names = _taken(_chosen(case, rng, 1), x, gradients=True)
        run = functools.partial(every, names)

        def program(*operands: Tensor, names: tuple[str, ...] = names) -> tuple[Tensor, ...]:
            return every(names, *operands)

        with compiler(case):
            compiled = torch.compile(program, backend="aot_eager_decomp_partition", fullgraph=True)
            seen = results(names, compiled, x)
        _judge(case, dtype, seen, results(names, run, x), results(names, run, x.cpu().double()))


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("part", [deep("standard", "some")])
def test_exported_options(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    """Outputs of an exported program that is taken apart."""
    for dtype in dtypes_of(case, target):
        x = operand(dtype, target.device, rng)
        names = _taken(_chosen(case, rng, 2), x, gradients=False)
        run = functools.partial(every, names)
        operands = tuple(x.clone() for _ in names)
        with compiler(case):
            captured = WAYS["export-decomposed"].make(run, operands)
            seen = dict(zip(names, captured(*operands), strict=True))
        exact = dict(zip(names, run(*(one.cpu().double() for one in operands)), strict=True))
        _judge(case, dtype, seen, dict(zip(names, run(*operands), strict=True)), exact)


def _judge(
    case: Case, dtype: torch.dtype, seen: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    case.at_least(f"{dtype}: results", len(expected), 1)
    for name, right in expected.items():
        case.equal(f"{dtype}: type of {name}", seen[name].dtype, right.dtype)
        bound = error(right, exact[name]) + allowed(name) * FORMATS[dtype].unit_roundoff
        case.at_most(f"{dtype}: error of {name}", error(seen[name], exact[name]), bound)
