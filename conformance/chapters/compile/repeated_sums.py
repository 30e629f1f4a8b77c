"""Ops whose result or gradient is a sum of many equal contributions in 16 bits, of which the exact sum is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Op: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

COUNT = 3999
"""Contributions of 1: sums in bf16 end at 256, in fp16 at 2048, and 16 bits do not hold the exact sum."""
WIDTH = 4


# Each gets two rows of zeros, as many rows of zeros as there are contributions, and as many indices of 0.
SUMMED: Mapping[str, Op] = {
    "embedding": lambda few, many, at: functional.embedding(at, few),
    "embedding with padding": lambda few, many, at: functional.embedding(at, few, padding_idx=1),
    "embedding_bag": lambda few, many, at: functional.embedding_bag(at.view(-1, 3), few, mode="sum"),
    "index_select": lambda few, many, at: few.index_select(0, at),
    "indexing": lambda few, many, at: few[at],
    "gather": lambda few, many, at: few.gather(0, at[:, None].expand(-1, WIDTH)),
    "take_along_dim": lambda few, many, at: few.take_along_dim(at[:, None], 0),
    "take": lambda few, many, at: few.take(at),
    "expand": lambda few, many, at: few[:1].expand(COUNT, WIDTH) * 1,
    "repeat": lambda few, many, at: few[:1].repeat(COUNT, 1),
    "repeat_interleave": lambda few, many, at: few[:1].repeat_interleave(COUNT, 0),
    "broadcast add": lambda few, many, at: many + few[0],
    "broadcast mul": lambda few, many, at: (many + 1) * few[0],
    "where": lambda few, many, at: torch.where(many < 1, few[0], many),
    "bias of linear": lambda few, many, at: functional.linear(many, few.new_zeros(WIDTH, WIDTH), few[0]),
    "bias of addmm": lambda few, many, at: torch.addmm(few[0], many, few.new_zeros(WIDTH, WIDTH)),
    "weight of linear": lambda few, many, at: functional.linear(many + 1, few),
    "bias of conv1d": lambda few, many, at: functional.conv1d(many.t()[None], few.new_zeros(WIDTH, WIDTH, 1), few[0]),
    "bias of layer_norm": lambda few, many, at: functional.layer_norm(many, (WIDTH,), few[1], few[0]),
    "bias of group_norm": lambda few, many, at: functional.group_norm(many, 2, few[1], few[0]),
    "bias of batch_norm": lambda few, many, at: functional.batch_norm(many, None, None, few[1], few[0], True),
}
"""Ops by name, of which the first row of `few` gets a gradient of COUNT contributions of 1."""

ADDED: Mapping[str, Op] = {
    "index_add": lambda few, many, at: few.index_add(0, at, many + 1),
    "scatter_add": lambda few, many, at: few.scatter_add(0, at[:, None].expand(-1, WIDTH), many + 1),
    "scatter_reduce": lambda few, many, at: few.scatter_reduce(0, at[:, None].expand(-1, WIDTH), many + 1, "sum"),
    "index_put": lambda few, many, at: few.index_put((at,), many + 1, accumulate=True),
    "put": lambda few, many, at: few.put(at, many[:, 0] + 1, accumulate=True),
    "sum": lambda few, many, at: (many + 1).sum(0, keepdim=True),
}
"""Ops by name, of which the first element of the result is the sum itself."""

BY_A_KERNEL = ("embedding_bag", "indexing", "take", "index_put", "put")
"""Ops that no decomposition of torch sums: compiled, their sum is that of eager's kernel."""


def sums(
    ops: Mapping[str, Op], device: torch.device, dtype: torch.dtype, run: Callable[..., list[Tensor]]
) -> dict[str, Tensor]:
    """Run the ops as one program that `run` calls, and return by name the sum that each makes, forward or backward."""
    at = torch.zeros(COUNT, dtype=torch.long, device=device)
    many = torch.zeros(COUNT, WIDTH, dtype=dtype, device=device)
    leaves = [torch.zeros(2, WIDTH, dtype=dtype, device=device, requires_grad=name in SUMMED) for name in ops]
    results = dict(zip(ops, run(many, at, *leaves), strict=True))
    backward = [name for name in ops if name in SUMMED]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = [results[name] for name in backward]
    gradients = torch.autograd.grad(outputs, wanted, [torch.ones_like(each) for each in outputs]) if outputs else ()
    found = {**results, **dict(zip(backward, gradients, strict=True))}
    return {name: each.detach().flatten()[0] for name, each in found.items()}


def program(ops: Mapping[str, Op]) -> Callable[..., list[Tensor]]:
    """Return one function of tensors that runs all the ops."""

    def run(many: Tensor, at: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [op(few, many, at) for op, few in zip(ops.values(), leaves, strict=True)]

    return run
