"""Check decomposed ops that add a product to what nearly cancels it, so that a product that is rounded before shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiling, dtypes_of

ROUNDINGS = 4.0
"""Of the largest number of the result, beside what eager makes: a sum in float32 is rounded once."""


class Sum(NamedTuple):
    """An op of an addend and two factors, the shapes of the factors, and the product that it adds."""

    op: Callable[[Tensor, Tensor, Tensor], Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul


SUMS: Mapping[str, Sum] = {
    "baddbmm": Sum(torch.baddbmm, ((2, 4, 64), (2, 64, 5))),
    "baddbmm, scaled": Sum(lambda s, a, b: torch.baddbmm(s, a, b, beta=2, alpha=0.5), ((2, 4, 64), (2, 64, 5))),
    "addbmm": Sum(torch.addbmm, ((2, 4, 64), (2, 64, 5)), lambda a, b: (a @ b).sum(0)),
    "addmm": Sum(torch.addmm, ((4, 64), (64, 5))),
    "addmm, scaled": Sum(lambda s, a, b: torch.addmm(s, a, b, beta=2, alpha=0.5), ((4, 64), (64, 5))),
    "addmv": Sum(torch.addmv, ((4, 64), (64,))),
    "addr": Sum(torch.addr, ((4,), (5,)), torch.outer),
    "addcmul": Sum(torch.addcmul, ((4, 5), (4, 5)), torch.mul),
    "addcdiv": Sum(torch.addcdiv, ((4, 5), (4, 5)), torch.div),
    "linear": Sum(lambda s, a, b: F.linear(a, b.t(), s[0]), ((1, 64), (64, 5))),
}


class _All(torch.nn.Module):
    def forward(self, operands: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        return [one.op(*given) for one, given in zip(SUMS.values(), operands, strict=True)]


def _drawn(dtype: torch.dtype, rng: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each op, what cancels its product but for the roundings of that, and the factors."""
    found = []
    for name, one in SUMS.items():
        a, b = ((torch.rand(shape, generator=rng) + 0.5).to(dtype) for shape in one.shapes)
        share = 0.25 if "scaled" in name else 1.0
        found.append(((-share * one.product(a.double(), b.double())).to(dtype), a, b))
    return found


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("way", ["export-decomposed", deep("standard", "aot_eager_decomp_partition")])
def test_cancelling_sums(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    for dtype in dtypes_of(case, target):
        drawn = _drawn(dtype, rng)
        given = [tuple(one.to(target.device) for one in three) for three in drawn]
        module = _All()
        with compiling(case, "aot_eager_decomp_partition"):
            if way == "export-decomposed":
                call = torch.export.export(module, (given,)).run_decompositions().module()
            else:
                call = torch.compile(module, backend=way, fullgraph=True)
            found = call(given)
        for (name, one), wide, seen, eager in zip(SUMS.items(), drawn, found, module(given), strict=True):
            exact = one.op(*(each.double() for each in wide))
            unit, largest = torch.finfo(dtype).eps / 2, exact.abs().max()
            far, near = (float((each.cpu().double() - exact).abs().max() / largest) for each in (seen, eager))
            case.equal(f"{dtype}: type of {name}", seen.dtype, eager.dtype)
            case.at_most(f"{dtype}: error of {name}", far, near + ROUNDINGS * unit)
