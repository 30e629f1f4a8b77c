"""Check that compiled code refuses operands of two types where eager refuses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.relations.outcomes import taken
from .support import compiler, drawn, inductor, refuses

Make: TypeAlias = Callable[..., Tensor]  # of a shape: a tensor of one of the two types
Op: TypeAlias = Callable[[Make, Make], Callable[[], object]]

SIZES = {  # rows, terms and columns of products
    "one by one": (1, 1, 1),
    "of one row": (1, 8, 8),
    "of one term": (8, 1, 8),
    "of one column": (8, 8, 1),
}


def _products(words: str, rows: int, terms: int, columns: int) -> dict[str, Op]:
    return {
        f"linear {words}": lambda a, b: partial(F.linear, a(rows, terms), b(columns, terms)),
        f"mm {words}": lambda a, b: partial(torch.mm, a(rows, terms), b(terms, columns)),
        f"bmm {words}": lambda a, b: partial(torch.bmm, a(2, rows, terms), b(2, terms, columns)),
        f"addmm {words}": lambda a, b: partial(torch.addmm, a(columns), a(rows, terms), b(terms, columns)),
        f"mv {words}": lambda a, b: partial(torch.mv, a(rows, terms), b(terms)),
    }


THIN: dict[str, Op] = {name: op for words, sizes in SIZES.items() for name, op in _products(words, *sizes).items()}
PRODUCTS: dict[str, Op] = {
    **{name: op for name, op in _products("of matrices", 8, 16, 8).items() if not name.startswith("mv")},
    "dot": lambda a, b: partial(torch.dot, a(8), b(8)),
    "baddbmm": lambda a, b: partial(torch.baddbmm, a(2, 8, 8), a(2, 8, 8), b(2, 8, 8)),
    "addbmm": lambda a, b: partial(torch.addbmm, a(8, 8), a(2, 8, 8), b(2, 8, 8)),
    "einsum": lambda a, b: partial(torch.einsum, "ik,jk->ij", a(8, 8), b(8, 8)),
    "tensordot": lambda a, b: partial(torch.tensordot, a(8, 8), b(8, 8), 1),
    "multi_dot": lambda a, b: partial(torch.linalg.multi_dot, [a(8, 8), b(8, 8), a(8, 8)]),
    "bilinear": lambda a, b: partial(F.bilinear, a(4, 8), a(4, 8), b(3, 8, 8)),
    "conv1d": lambda a, b: partial(F.conv1d, a(1, 3, 8), b(2, 3, 3)),
    "conv2d": lambda a, b: partial(F.conv2d, a(1, 3, 8, 8), b(2, 3, 3, 3)),
    "conv2d of one place": lambda a, b: partial(F.conv2d, a(1, 3, 8, 8), b(2, 3, 1, 1)),
    "conv3d": lambda a, b: partial(F.conv3d, a(1, 3, 4, 4, 4), b(2, 3, 3, 3, 3)),
    "conv_transpose2d": lambda a, b: partial(F.conv_transpose2d, a(1, 3, 8, 8), b(3, 2, 3, 3)),
    "attention of other keys": lambda a, b: partial(
        F.scaled_dot_product_attention, a(1, 2, 8, 16), b(1, 2, 8, 16), b(1, 2, 8, 16)
    ),
    "attention of other values": lambda a, b: partial(
        F.scaled_dot_product_attention, a(1, 2, 8, 16), a(1, 2, 8, 16), b(1, 2, 8, 16)
    ),
    "attention with another mask": lambda a, b: partial(
        F.scaled_dot_product_attention, a(1, 2, 8, 16), a(1, 2, 8, 16), a(1, 2, 8, 16), b(8, 8)
    ),
    "LSTM cell": lambda a, b: partial(torch.lstm_cell, a(3, 4), (a(3, 4), a(3, 4)), b(16, 4), b(16, 4), None, None),
}
ADDENDS: dict[str, Op] = {  # of another type than the rest
    "linear with a bias": lambda a, b: partial(F.linear, a(8, 8), a(8, 8), b(8)),
    "linear of one term with a bias": lambda a, b: partial(F.linear, a(8, 1), a(8, 1), b(8)),
    "addmm to a vector": lambda a, b: partial(torch.addmm, b(8), a(8, 8), a(8, 8)),
    "addmm of one row to a vector": lambda a, b: partial(torch.addmm, b(8), a(1, 8), a(8, 8)),
    "conv2d with a bias": lambda a, b: partial(F.conv2d, a(1, 3, 8, 8), a(2, 3, 3, 3), b(2)),
    "layer_norm with a bias": lambda a, b: partial(F.layer_norm, a(3, 8), (8,), a(8), b(8)),
    "batch_norm with a bias": lambda a, b: partial(F.batch_norm, a(3, 8), None, None, a(8), b(8), True),
}
WEIGHTS: dict[str, Op] = {
    "layer_norm": lambda a, b: partial(F.layer_norm, a(3, 8), (8,), b(8), b(8)),
    "rms_norm": lambda a, b: partial(F.rms_norm, a(3, 8), (8,), b(8)),
    "batch_norm": lambda a, b: partial(F.batch_norm, a(3, 8), None, None, b(8), b(8), True),
    "batch_norm by statistics": lambda a, b: partial(F.batch_norm, a(3, 8), b(8), b(8).abs() + 1),
    "group_norm": lambda a, b: partial(F.group_norm, a(3, 8), 2, b(8), b(8)),
    "instance_norm": lambda a, b: partial(F.instance_norm, a(2, 3, 8), None, None, b(3), b(3)),
    "prelu": lambda a, b: partial(F.prelu, a(3, 8), b(1)),
    "embedding_bag": lambda a, b: partial(
        F.embedding_bag, _places(a, 1, 2), a(3, 8), mode="sum", per_sample_weights=b(1, 2)
    ),
    "nll_loss": lambda a, b: partial(F.nll_loss, a(3, 8), _places(a, 3), b(8)),
    "cross_entropy": lambda a, b: partial(F.cross_entropy, a(3, 8), _places(a, 3), b(8)),
    "binary_cross_entropy": lambda a, b: partial(F.binary_cross_entropy, a(3, 8).sigmoid(), b(3, 8).sigmoid()),
}
WRITES: dict[str, Op] = {
    "index_add": lambda a, b: partial(torch.index_add, a(4, 8), 0, _places(a, 3), b(3, 8)),
    "index_copy": lambda a, b: partial(torch.index_copy, a(4, 8), 0, _places(a, 3), b(3, 8)),
    "index_put": lambda a, b: partial(torch.index_put, a(4, 8), (_places(a, 3),), b(3, 8)),
    "index_reduce": lambda a, b: partial(torch.index_reduce, a(4, 8), 0, _places(a, 3), b(3, 8), "amax"),
    "masked_scatter": lambda a, b: partial(torch.masked_scatter, a(4, 8), a(4, 8) > 0, b(4, 8)),
    "scatter": lambda a, b: partial(torch.scatter, a(4, 8), 0, _places(a, 3, 8), b(3, 8)),
    "scatter_add": lambda a, b: partial(torch.scatter_add, a(4, 8), 0, _places(a, 3, 8), b(3, 8)),
    "scatter_reduce": lambda a, b: partial(torch.scatter_reduce, a(4, 8), 0, _places(a, 3, 8), b(3, 8), "amax"),
}
OTHERS: dict[str, Op] = {
    "cross": lambda a, b: partial(torch.linalg.cross, a(4, 3), b(4, 3)),
    "dist": lambda a, b: partial(torch.dist, a(8), b(8)),
    "grid_sample": lambda a, b: partial(F.grid_sample, a(1, 1, 4, 4), b(1, 2, 2, 2), align_corners=False),
    "heaviside": lambda a, b: partial(torch.heaviside, a(8), b(8)),
    "lerp": lambda a, b: partial(torch.lerp, a(8), b(8), 0.5),
    "lerp by another weight": lambda a, b: partial(torch.lerp, a(8), a(8), b(8)),
    "polar": lambda a, b: partial(torch.polar, a(8), b(8)),
}
GROUPS = {
    "products": PRODUCTS,
    "thin_products": THIN,
    "addends": ADDENDS,
    "weights": WEIGHTS,
    "writes": WRITES,
    "others": OTHERS,
}
IN_KERNELS = {group: "standard" if group == "writes" else "full" for group in GROUPS}
SOME = 6  # calls at level quick


def _places(like: Make, *shape: int) -> Tensor:
    return torch.arange(shape[0], device=like(1).device).view(-1, *(1,) * (len(shape) - 1)).expand(shape).contiguous()


def _maker(target: Target, dtype: torch.dtype, rng: torch.Generator) -> Make:
    return lambda *shape: torch.randn(shape, generator=rng).to(target.device, dtype)


def _pairs(case: Case, target: Target, rng: torch.Generator) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return pairs of two types, one of 16 bits: all at level full, else one that the seed chooses."""
    types = (*case.supported(target), torch.float32)
    pairs = list(itertools.permutations(types, 2))
    return pairs if case.level == "full" else [pairs[int(torch.randint(len(pairs), (), generator=rng))]]


def _calls(
    case: Case, target: Target, rng: torch.Generator, ops: dict[str, Op]
) -> Iterator[tuple[str, Callable[[], object]]]:
    for ours, theirs in _pairs(case, target, rng):
        a, b = _maker(target, ours, rng), _maker(target, theirs, rng)
        for name, op in ops.items():
            yield f"{name} of {ours} and {theirs}", op(a, b)


def _judge(case: Case, target: Target, rng: torch.Generator, ops: dict[str, Op], backend: str) -> None:
    """Compile each call that eager refuses."""
    judged = 0
    with torch.no_grad():
        for name, call in _calls(case, target, rng, ops):
            if taken(call):
                continue
            judged += 1
            refuses(case, name, lambda call=call: call(), backend)  # type: ignore[misc]
    case.enough(target, "calls that eager refuses", judged)


@contract("AMP-COMPILE-091")
@pytest.mark.parametrize("part", ["some", deep("standard", "all")])
def test_graphs_refuse(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    every = {name: op for ops in GROUPS.values() for name, op in ops.items()}
    with compiler(case):
        _judge(case, target, rng, every if part == "all" else drawn(every, rng, SOME), "aot_eager")


@contract("AMP-COMPILE-091")
@pytest.mark.parametrize("group", [deep("standard", group) for group in GROUPS])
def test_decompositions_refuse(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    with compiler(case):
        _judge(case, target, rng, GROUPS[group], "aot_eager_decomp_partition")


@contract("AMP-COMPILE-091")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep(level, group) for group, level in IN_KERNELS.items()])
def test_kernels_refuse(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    with compiler(case), inductor(case):
        _judge(case, target, rng, GROUPS[group], "inductor")
