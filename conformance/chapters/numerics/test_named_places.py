"""Check what is added up at places that are named several times, by lists longer than kernels take at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
TIMES = 16  # how often each place is named: exact in every type
WIDTHS = (1, 3, 8)
# One more than kernels take at once, and many times that.
COUNTS = (257, 1025, 70001)


def _of_lookup(index: Tensor, zeros: Tensor, call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    table = zeros.clone().requires_grad_()
    result = call(index, table)
    (gradient,) = torch.autograd.grad(result, table, torch.ones_like(result))
    return gradient


def _spread(index: Tensor, zeros: Tensor) -> Tensor:
    return index.view(-1, 1).expand(-1, zeros.shape[1])


def _ones(index: Tensor, zeros: Tensor) -> Tensor:
    return zeros.new_ones(index.numel(), zeros.shape[1])


def _bag(index: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(index, table, torch.arange(0, index.numel(), 5, device=index.device), mode="sum")


# Each is given the places and zeros, and returns how often each of them was named.
SUMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda index, zeros: zeros.index_add(0, index, _ones(index, zeros)),
    "index_put": lambda index, zeros: zeros.index_put((index,), _ones(index, zeros), accumulate=True),
    "scatter_add": lambda index, zeros: zeros.scatter_add(0, _spread(index, zeros), _ones(index, zeros)),
    "scatter_reduce": lambda index, zeros: zeros.scatter_reduce(
        0, _spread(index, zeros), _ones(index, zeros), "sum", include_self=False
    ),
    "gradient of embedding": partial(_of_lookup, call=F.embedding),
    "gradient of embedding_bag": partial(_of_lookup, call=_bag),
    "gradient of index_select": partial(_of_lookup, call=lambda index, table: table.index_select(0, index)),
    "gradient of gather": partial(_of_lookup, call=lambda index, table: table.gather(0, _spread(index, table))),
    "gradient of an index": partial(_of_lookup, call=lambda index, table: table[index]),
}


def _orders(count: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    rows = count // TIMES + 1
    alike = torch.arange(count) // TIMES
    yield "one after the other", alike
    yield "in turn", torch.arange(count) % rows
    yield "in no order", alike[torch.randperm(count, generator=generator)]


@contract("AMP-NUMERICS-139")
@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("count", COUNTS)
def test_places_named_several_times(case: Case, target: Target, amp_dtype: torch.dtype, count: int, op: str) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    wrong = {}
    rows = count // TIMES + 1
    index, zeros = torch.zeros(2, dtype=torch.int64, device=target.device), torch.zeros(2, 1, dtype=amp_dtype)
    case.with_kernels(target, {op: partial(SUMS[op], index, zeros.to(target.device))})
    for name, index in _orders(count, generator):
        exact = torch.bincount(index, minlength=rows).double()
        for width in WIDTHS:
            zeros = torch.zeros(rows, width, dtype=amp_dtype, device=target.device)
            seen = SUMS[op](index.to(target.device), zeros).cpu().double()
            far = int((seen != exact[:, None]).sum())
            if far:
                wrong[f"{name}, rows of {width}"] = f"{far} of {seen.numel()} are not how often they are named"
    case.equal("sums that are not exact", wrong, {})
