"""Ops that read numbers of which one is NaN, and which of their results that must reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Callable[[Tensor], Tensor]


class Reader(NamedTuple):
    """An op of one tensor, and which results read which numbers.

    `reaches` is given a float64 tensor on the CPU of ones where NaNs are and zeros elsewhere, and returns a tensor of
    the shape of the result that is above zero where at least one of them is read. `alone` says that no other results
    may be NaN; fast algorithms of convolutions take numbers together.
    """

    name: str
    shape: tuple[int, ...]
    op: Op
    reaches: Op
    alone: bool = True


def _all_of(dims: tuple[int, ...]) -> Op:
    return lambda mask: mask.amax(dims, keepdim=True).expand_as(mask)


def _from_there(dim: int) -> Op:
    return lambda mask: mask.cumsum(dim)


def readers() -> Iterator[Reader]:
    """Yield ops by element, along a dimension, over windows and over all, whose results are NaN if they read one."""
    elements: tuple[tuple[str, Op], ...] = (
        *((name, getattr(F, name)) for name in ("relu", "relu6", "elu", "selu", "celu", "leaky_relu", "gelu", "silu")),
        *(
            (name, getattr(F, name))
            for name in ("mish", "softplus", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid")
        ),
        *((name, getattr(F, name)) for name in ("tanhshrink", "softsign", "softshrink", "hardshrink")),
        *((name, getattr(torch, name)) for name in ("sigmoid", "tanh", "exp", "log1p", "sin", "abs", "neg", "square")),
        *((name, getattr(torch, name)) for name in ("floor", "ceil", "round", "trunc", "frac", "erf", "rsqrt")),
        ("clamp", partial(torch.clamp, min=-1.0, max=1.0)),
        ("clamp from below", partial(torch.clamp, min=-1.0)),
        ("clamp from above", partial(torch.clamp, max=1.0)),
        ("maximum", lambda x: torch.maximum(x, torch.full_like(x, 0.5))),
        ("minimum, second", lambda x: torch.minimum(torch.full_like(x, 0.5), x)),
        ("mul by zero", lambda x: x * 0.0),
        ("add", lambda x: x + 1.0),
        ("addcmul", lambda x: torch.addcmul(x, torch.ones_like(x), torch.ones_like(x))),
        ("lerp", lambda x: torch.lerp(x, torch.ones_like(x), 0.25)),
        ("prelu", lambda x: F.prelu(x, x.new_full((1,), 0.25))),
        ("dropout in evaluation", lambda x: F.dropout(x, 0.5, training=False)),
    )
    for name, op in elements:
        yield Reader(name, (3, 43), op, torch.clone)
    shape: tuple[int, ...]
    for shape, dim in (((3, 43), -1), ((43, 3), 0), ((2, 35, 3), 1)):
        axis = f"along {dim} of {len(shape)}"
        for name in ("sum", "mean", "amax", "amin", "prod", "std", "var", "logsumexp"):
            yield Reader(f"{name} {axis}", shape, partial(_reduced, name, dim), partial(_most, dim))
        for name in ("max", "min"):
            yield Reader(f"{name} {axis}", shape, partial(_first, name, dim), partial(_most, dim))
        for order in (1, 2, 3, torch.inf, -torch.inf):
            norm = partial(torch.linalg.vector_norm, ord=order, dim=dim)
            yield Reader(f"norm of order {order} {axis}", shape, norm, partial(_most, dim))
        for name in ("softmax", "log_softmax", "softmin", "normalize"):
            yield Reader(f"{name} {axis}", shape, partial(getattr(F, name), dim=dim), _all_of((dim,)))
        for name in ("cumsum", "cumprod", "logcumsumexp"):
            yield Reader(f"{name} {axis}", shape, partial(getattr(torch, name), dim=dim), _from_there(dim))
        for name in ("cummax", "cummin"):
            yield Reader(f"{name} {axis}", shape, partial(_first, name, dim), _from_there(dim))
    for name in ("max", "min", "sum", "mean", "norm"):
        yield Reader(f"{name} of all", (7, 43), getattr(torch, name), torch.max)
    yield Reader("layer_norm", (5, 35), lambda x: F.layer_norm(x, (35,)), _all_of((1,)))
    yield Reader("group_norm", (2, 4, 9), lambda x: F.group_norm(x, 4), _all_of((2,)))
    yield Reader("batch_norm", (6, 5), lambda x: F.batch_norm(x, None, None, training=True), _all_of((0,)))
    yield Reader(
        "linear", (5, 35), lambda x: F.linear(x, torch.ones_like(x)), lambda m: m.amax(1, keepdim=True).expand(5, 5)
    )
    yield Reader("product, second", (35, 5), lambda x: x.T.new_ones(3, 35) @ x, lambda m: m.amax(0).expand(3, 5))
    for rank, largest, average in ((1, F.max_pool1d, F.avg_pool1d), (2, F.max_pool2d, F.avg_pool2d)):
        shape = (2, 3, *(9, 8)[:rank])
        for size, stride in ((2, 2), (3, 1), (3, 2)):
            window = partial(largest, kernel_size=size, stride=stride)
            yield Reader(f"max_pool{rank}d, {size} by {stride}", shape, window, window)
            yield Reader(
                f"avg_pool{rank}d, {size} by {stride}", shape, partial(average, kernel_size=size, stride=stride), window
            )
    yield Reader("max_pool3d", (2, 3, 4, 4, 5), lambda x: F.max_pool3d(x, 2), lambda m: F.max_pool3d(m, 2))
    for rank, into in ((1, 4), (2, (4, 3)), (3, (2, 1, 3))):
        shape = (2, 3, *(9, 8, 5)[:rank])
        largest, average = (getattr(F, f"adaptive_{kind}_pool{rank}d") for kind in ("max", "avg"))
        windows = partial(largest, output_size=into)
        yield Reader(f"adaptive_max_pool{rank}d", shape, windows, windows)
        yield Reader(f"adaptive_avg_pool{rank}d", shape, partial(average, output_size=into), windows)
    yield Reader(
        "convolution",
        (2, 3, 6, 7),
        _convolved,
        lambda m: F.max_pool2d(m.amax(1, keepdim=True), 3, 1).expand(2, 4, 4, 5),
        alone=False,
    )


def _reduced(name: str, dim: int, x: Tensor) -> Tensor:
    result: Tensor = getattr(torch, name)(x, dim)
    return result


def _most(dim: int, mask: Tensor) -> Tensor:
    return mask.amax(dim)


def _first(name: str, dim: int, x: Tensor) -> Tensor:
    result: Tensor = getattr(torch, name)(x, dim)[0]
    return result


def _convolved(x: Tensor) -> Tensor:
    return F.conv2d(x, x.new_ones(4, 3, 3, 3))
