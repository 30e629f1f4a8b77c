"""Programs with hooks on tensors and modules, whose numbers 16 bits hold, so that every way to run them gives one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Program: TypeAlias = Callable[[Tensor, Tensor], Any]


def scaled(slope: Tensor | None) -> Tensor | None:
    """Return a gradient times what tells its type; the compiler may call a hook without one."""
    return slope if slope is None else slope * (4 if slope.dtype is torch.float32 else 2)


def _product(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(scaled)
    return (y * 3).float().sum()


def _two_hooks(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(lambda slope: slope + 1)
    y.register_hook(scaled)
    return (y * 3).float().sum()


def _of_two_uses(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(scaled)
    return (y * 3).float().sum() + y.float().sum()


def _float32(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).float()
    y.register_hook(scaled)
    return (y * 3).sum()


def _argument(x: Tensor, w: Tensor) -> Tensor:
    y = w.clone()
    y.register_hook(scaled)
    return (x @ y).float().sum()


def _removed(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    handle = y.register_hook(scaled)
    handle.remove()
    return (y * 3).float().sum()


def _retained(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    y.retain_grad()
    return (y * 3).float().sum(), y


def _then_breaks(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(scaled)
    torch._dynamo.graph_break()
    return (y * 3).float().sum()


def _breaks_before(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    z = y * 3
    torch._dynamo.graph_break()
    y.register_hook(scaled)
    return z.float().sum()


class _Layer(torch.nn.Module):
    """A product whose module has a hook."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w


def _module(register: Callable[[torch.nn.Module], Any]) -> Program:
    layer = _Layer()
    register(layer)
    return lambda x, w: (layer(x, w) * 3).float().sum()


PROGRAMS: dict[str, Callable[[], Program]] = {
    "product": lambda: _product,
    "two-hooks": lambda: _two_hooks,
    "two-uses": lambda: _of_two_uses,
    "float32": lambda: _float32,
    "argument": lambda: _argument,
    "removed": lambda: _removed,
    "retained": lambda: _retained,
    "then-breaks": lambda: _then_breaks,
    "breaks-before": lambda: _breaks_before,
    "forward": lambda: _module(lambda layer: layer.register_forward_hook(lambda module, given, made: made * 2)),
    "forward-pre": lambda: _module(
        lambda layer: layer.register_forward_pre_hook(lambda module, given: (given[0] * 2, given[1]))
    ),
    "backward": lambda: _module(
        lambda layer: layer.register_full_backward_hook(lambda module, slopes, outer: tuple(map(scaled, slopes)))
    ),
    "backward-pre": lambda: _module(
        lambda layer: layer.register_full_backward_pre_hook(lambda module, slopes: (scaled(slopes[0]),))
    ),
}
"""Programs of a matrix of data and one that needs a gradient: a loss, and what the gradient is kept of."""


def _saves(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float().sum()


def _saves_before_a_break(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    torch._dynamo.graph_break()
    return y.float().sum()


SAVING: dict[str, Program] = {"product": _saves, "then-breaks": _saves_before_a_break}
"""Programs that save the matrix of data alone for backward, eager or compiled, from which the gradient is made."""
