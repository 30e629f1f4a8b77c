"""Check that writes to a part of a tensor change that part alone, and conversions to integers, in a region or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

SIZES = (4, 6, 40)  # the last of whole vectors and a rest
AROUND = 7.0
# Parts of a tensor with gaps between their elements, rows or blocks.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second element": lambda x: x[..., ::2],
    "every third row": lambda x: x[:, ::3],
    "a block": lambda x: x[1:3, 2:5, 3:38],
    "a column": lambda x: x[..., 5],
    "a turned block": lambda x: x[:, 1:4, 1:9].transpose(0, 2),
    "a diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "members of windows": lambda x: x.unfold(2, 3, 5)[..., 1],
    "last columns": lambda x: x[..., 33:],
}


def _random(x: Tensor, name: str, *numbers: float) -> Tensor:
    filled: Tensor = getattr(x, name)(*numbers)
    return filled


def _optimized(x: Tensor) -> Tensor:
    """Reset the gradient of a parameter in place, as an optimizer does."""
    leaf = torch.nn.Parameter(torch.ones_like(x))
    leaf.grad = x
    torch.optim.SGD([leaf]).zero_grad(set_to_none=False)
    return x


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero_": lambda x: x.zero_(),
    "zero_grad(set_to_none=False)": _optimized,
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "copy_ of float32": lambda x: x.copy_(torch.ones_like(x, dtype=torch.float32)),
    "copy_ of a number": lambda x: x.copy_(torch.ones((), device=x.device)),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0], device=x.device), 2),
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(0),
    "addcmul_": lambda x: x.addcmul_(torch.ones_like(x), torch.ones_like(x)),
    "clamp_": lambda x: x.clamp_(max=1),
    "relu_": lambda x: x.sub_(9).relu_(),
    "exp_": lambda x: x.zero_().exp_(),
    "_foreach_zero_": lambda x: (torch._foreach_zero_([x]), x)[1],
    "_foreach_mul_": lambda x: (torch._foreach_mul_([x], 0.5), x)[1],
    "uniform_": partial(_random, name="uniform_"),
    "normal_": partial(_random, name="normal_"),
    "bernoulli_": partial(_random, name="bernoulli_"),
    "nan_to_num_": lambda x: x.nan_to_num_().neg_(),
}
DRAWN = ("uniform_", "normal_", "bernoulli_")


def _regions(target: Target, dtype: torch.dtype) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {"outside": contextlib.nullcontext, "in a region": partial(target.autocast, dtype)}


@contract("AMP-REGION-115")
@pytest.mark.parametrize("part", PARTS, ids=lambda name: name.replace(" ", "_"))
def test_writes_to_a_part(case: Case, target: Target, amp_dtype: torch.dtype, part: str) -> None:
    wrong = {}
    for name, write in WRITES.items():
        for dtype in (torch.float32, amp_dtype):
            for place, region in _regions(target, amp_dtype).items():
                whole, mask = torch.full(SIZES, AROUND, dtype=dtype, device=target.device), torch.zeros(SIZES)
                PARTS[part](mask).fill_(1)
                alone = PARTS[part](whole).clone(memory_format=torch.contiguous_format)
                with region():
                    write(PARTS[part](whole))
                    write(alone)
                written = PARTS[part](whole)
                same = written.dtype == dtype and (name in DRAWN or torch.equal(written, alone))
                if not same or bool((whole.cpu() != AROUND)[mask == 0].any()):
                    wrong[f"{name} of {dtype} {place}"] = "other elements" if same else "the part"
                elif bool((written == AROUND).all()):
                    wrong[f"{name} of {dtype} {place}"] = "nothing is written"
    case.equal("writes that change other elements than theirs, or theirs otherwise than of a whole tensor", wrong, {})


NUMBERS = (0.0, -0.0, 0.25, 0.5, -0.5, 0.984375, -0.984375, 1.0, -1.5, 2.5, -3.75, 100.75, -100.25, 127.0, 2.0**-24)
TO_INTEGERS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "to(dtype)": lambda x, to: x.to(to),
    "to(device, dtype)": lambda x, to: x.to(x.device, to),
    "to(dtype, non_blocking)": lambda x, to: x.to(to, non_blocking=True),
    "type(dtype)": lambda x, to: x.type(to),
    "its own method": lambda x, to: getattr(x, {torch.bool: "bool", torch.int32: "int", torch.int64: "long"}[to])(),
    "copy_": lambda x, to: torch.empty_like(x, dtype=to).copy_(x),
}


@contract("AMP-REGION-115")
def test_conversions_to_integers(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """Truncate towards zero; every number but zero, NaN too, is true."""
    wrong = {}
    for name, conversion in TO_INTEGERS.items():
        for given in (torch.float32, amp_dtype):
            for to in (torch.bool, torch.int32, torch.int64):
                numbers = (*NUMBERS, *([float("inf"), float("nan")] if to is torch.bool else []))
                host = torch.tensor(numbers, dtype=given).repeat(3)
                promised = [bool(one) if to is torch.bool else int(one) for one in host.tolist()]
                for layout, x in {"contiguous": host, "of steps": torch.stack([host, host], 1)[:, 0]}.items():
                    for place, region in _regions(target, amp_dtype).items():
                        with region():
                            made = conversion(x.to(target.device), to)
                        if made.dtype != to or made.tolist() != promised:
                            wrong[f"{name} of {given} to {to}, {layout}, {place}"] = made.tolist()[:17]
    case.equal("conversions that do not truncate towards zero, or take a number for false", wrong, {})
