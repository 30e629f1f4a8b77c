"""Writes into views of 16-bit tensors, and the views: of gaps, of an odd beginning, of turned dimensions.

Every number is an integer or a quarter that 16 bits hold, before and after each write, so that results are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

# From a tensor of SHAPE to a view of it. The functions of an index give the places of the view in the tensor.
View: TypeAlias = Callable[[Tensor], Tensor]
# Of a view, and of a tensor of its shape.
Write: TypeAlias = Callable[[Tensor, Tensor], object]
SHAPE = (5, 6, 7, 9)
VIEWS: Mapping[str, View] = {
    "every second row": lambda base: base[:, :, ::2],
    "every second number": lambda base: base[..., ::2],
    "every third number of one row": lambda base: base.flatten()[1::3][:21],
    "some columns": lambda base: base[..., 1:4],
    "one column": lambda base: base[..., 2],
    "behind one number": lambda base: base.flatten()[1:],
    "an odd number of numbers": lambda base: base.flatten()[64:129],
    "one sample": lambda base: base[1],
    "turned": lambda base: base.permute(3, 0, 2, 1)[1:],
    "a diagonal": lambda base: base.diagonal(0, 1, 2),
    "windows with gaps": lambda base: base.unfold(3, 2, 3),
}


def _index(view: Tensor) -> Tensor:
    return torch.arange(0, view.shape[0], 2, device=view.device)


def _places(view: Tensor) -> Tensor:
    """Return an index of each number of a view along the first dimension, each once."""
    count = view.shape[0]
    ramp = torch.arange(count - 1, -1, -1, device=view.device)
    return ramp.view(count, *[1] * (view.dim() - 1)).expand(view.shape)


def _set(view: Tensor, other: Tensor) -> None:
    view[...] = other


WRITES: Mapping[str, Write] = {
    "zero_": lambda view, other: view.zero_(),
    "fill_": lambda view, other: view.fill_(3.0),
    "fill_ by a tensor": lambda view, other: view.fill_(torch.tensor(-2.0, device=view.device)),
    "neg_": lambda view, other: view.neg_(),
    "abs_": lambda view, other: view.abs_(),
    "sign_": lambda view, other: view.sign_(),
    "floor_": lambda view, other: view.floor_(),
    "square_": lambda view, other: view.square_(),
    "relu_": lambda view, other: view.relu_(),
    "clamp_": lambda view, other: view.clamp_(-2.0, 1.5),
    "clamp_min_": lambda view, other: view.clamp_min_(-0.5),
    "threshold_": lambda view, other: torch.threshold_(view, 1.0, -3.0),
    "add_ of a number": lambda view, other: view.add_(2.0),
    "mul_ by a number": lambda view, other: view.mul_(0.5),
    "div_ by a number": lambda view, other: view.div_(2.0),
    "index_fill_": lambda view, other: view.index_fill_(0, _index(view), 3.0),
    "copy_": lambda view, other: view.copy_(other),
    "setitem": _set,
    "add_": lambda view, other: view.add_(other, alpha=2),
    "sub_": lambda view, other: view.sub_(other),
    "mul_": lambda view, other: view.mul_(other),
    "div_": lambda view, other: view.div_(2.0 ** (other.sign() + 1)),
    "maximum": lambda view, other: torch.maximum(view, other.to(view.dtype), out=view),
    "addcmul_": lambda view, other: view.addcmul_(other.to(view.dtype), other.to(view.dtype), value=0.5),
    "addcdiv_": lambda view, other: view.addcdiv_(
        other.to(view.dtype), 2.0 ** (other.to(view.dtype).sign() + 1), value=0.5
    ),
    "lerp_": lambda view, other: view.lerp_(other.to(view.dtype), 0.5),
    "masked_fill_": lambda view, other: view.masked_fill_(other > 0, 1.5),
    "masked_scatter_": lambda view, other: view.masked_scatter_(other > 0, other.to(view.dtype)),
    "where, out": lambda view, other: torch.where(other > 0, view.clone(), other.to(view.dtype), out=view),
    "add, out": lambda view, other: torch.add(view.clone(), other.to(view.dtype), out=view),
    "mul, out": lambda view, other: torch.mul(other.to(view.dtype), 2.0, out=view),
    "index_copy_": lambda view, other: view.index_copy_(0, _index(view), other.to(view.dtype)[::2]),
    "index_add_": lambda view, other: view.index_add_(0, _index(view), other.to(view.dtype)[::2]),
    "scatter_": lambda view, other: view.scatter_(0, _places(view), other.to(view.dtype)),
    "scatter_add_": lambda view, other: view.scatter_add_(0, _places(view), other.to(view.dtype)),
    "_foreach_zero_": lambda view, other: torch._foreach_zero_([view]),
    "_foreach_copy_": lambda view, other: torch._foreach_copy_([view], [other]),
    "_foreach_add_": lambda view, other: torch._foreach_add_([view], [other.to(view.dtype)], alpha=2),
    "_foreach_mul_": lambda view, other: torch._foreach_mul_([view], 0.5),
    "_foreach_lerp_": lambda view, other: torch._foreach_lerp_([view], [other.to(view.dtype)], 0.5),
}
# How what is written lies: in a tensor of its own, with the gaps of the view, and as one number for each column.
SOURCES: Mapping[str, Callable[[Tensor, View], Tensor]] = {
    "of its own memory": lambda base, view: view(base).contiguous(),
    "with the same gaps": lambda base, view: view(base),
    "expanded": lambda base, view: view(base)[:1].expand(view(base).shape),
}


def numbers(generator: torch.Generator) -> Tensor:
    """Return a tensor of SHAPE of quarters from -3 to 3."""
    return torch.randint(-12, 13, SHAPE, generator=generator) / 4


def written(base: Tensor, view: View, write: Write, other: Tensor) -> Tensor:
    """Return a tensor whose view was written into: the right one, which takes no view of it."""
    part = view(base).contiguous().clone()
    write(part, other)
    places = view(torch.arange(base.numel()).view(base.shape)).flatten()
    whole = base.clone().flatten()
    whole[places] = part.flatten()
    return whole.view(base.shape)
