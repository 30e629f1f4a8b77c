"""What ops make of parameters that parallelize_module splits over tensor ranks and fully_shard over data ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .comparison import all_of, unlike
from .meshes import integers, square

Op: TypeAlias = Callable[[Any, Any], Any]  # of the parameter and of a replicated tensor of its shape

PRODUCTS: dict[str, Op] = {
    "columns by columns": lambda w, x: w.t() @ w,
    "rows by rows": lambda w, x: w @ w.t(),
    "rows by those of x": lambda w, x: w @ x.t(),
    "rows of x by rows": lambda w, x: x @ w.t(),
    "columns of x by columns": lambda w, x: x.t() @ w,
    "linear": lambda w, x: nn.functional.linear(x, w),
}
OTHERS: dict[str, Op] = {
    "times x": lambda w, x: w * x,
    "x plus it": lambda w, x: x + w,
    "relu": lambda w, x: w.relu(),
    "sum over rows": lambda w, x: w.sum(0),
    "sum over columns": lambda w, x: w.sum(1),
    "sum": lambda w, x: w.sum(),
    "largest of rows": lambda w, x: w.amax(1),
    "largest of columns": lambda w, x: w.amax(0),
    "sums of squares": lambda w, x: w.square().sum(1),
    "cumulative sums": lambda w, x: w.cumsum(0),
    "transposed": lambda w, x: w.t(),
    "flat": lambda w, x: w.flatten(),
    "some rows": lambda w, x: w[1:3],
    "twice": lambda w, x: torch.cat([w, w]),
    "stacked": lambda w, x: torch.stack([w, w]),
    "second half": lambda w, x: w.chunk(2)[1],
    "turned round": lambda w, x: w.flip(0),
    "sorted": lambda w, x: w.sort(0)[0],
    "place of the largest": lambda w, x: w.argmax(0),
    "all of it": lambda w, x: w,
}
GROUPS = {"products": PRODUCTS, "other ops": OTHERS}
PARTS = ("values", "gradients")
SIZES = {"equal": (8, 12), "unequal": (6, 10)}
"""Rows and columns by the parts that four ranks have of them."""


def _split(mesh: Any, style: Any, whole: Tensor) -> Any:
    """Return a parameter of the values of `whole`, split by a style over the columns of the mesh, and over its rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model = nn.Sequential(nn.Linear(whole.shape[1], whole.shape[0], bias=False, dtype=whole.dtype))
    with torch.no_grad():
        model[0].weight.copy_(whole)
    parallelize_module(model, mesh["columns"], {"0": style})
    fully_shard(model, mesh=mesh["rows"])
    return model[0].weight


def _outcome(op: Op, parameter: Any, x: Any, region: torch.dtype | None) -> dict[str, Tensor]:
    parameter = parameter.detach().requires_grad_()
    with torch.autocast("cpu", dtype=region, enabled=region is not None):
        out = all_of(op(parameter, x))
    if not out.is_floating_point():
        return {"values": out}
    slopes = (torch.arange(out.numel()) % 3 - 1).view_as(out)  # other ones for each part
    (out * slopes).float().sum().backward()
    return {"values": out.detach(), "gradients": all_of(parameter.grad)}


def unlike_whole_parameters(
    dtype: torch.dtype, region: torch.dtype | None, size: tuple[int, int], seed: int
) -> tuple[dict[str, list[str]], int] | None:
    """Name by group of ops and part what differs from the whole parameter, and count the calls that are not refused.

    What DTensor has no rule for it refuses by an error, on every rank alike. Nothing is returned where fully_shard
    refuses parts that are not equal.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    mesh = square()
    found: dict[str, list[str]] = {f"{part} of {group}": [] for group in GROUPS for part in PARTS}
    judged = 0
    whole, other = integers(size, dtype, seed, 4), integers(size, dtype, seed + 1, 2)
    x = distribute_tensor(other.clone(), mesh, [Replicate(), Replicate()])
    for style, (group, ops) in itertools.product((ColwiseParallel, RowwiseParallel), GROUPS.items()):
        try:
            ours = _split(mesh, style(), whole)
        except NotImplementedError:
            return None
        for name, op in ops.items():
            right = _outcome(op, whole, other, region)
            try:
                seen = _outcome(op, ours, x, region)
            except Exception:
                continue
            judged += 1
            for part in right:
                told = unlike({part: seen[part] + 0}, {part: right[part] + 0})
                found[f"{part} of {group}"] += [f"{name}, {style.__name__}: {one}" for one in told]
    return found, judged
