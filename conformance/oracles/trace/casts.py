"""Casts of a call's arguments: the traced ones, and those that a policy predicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .ops import Conversion, OpTrace, identity


@dataclass(frozen=True)
class Cast:
    """One cast; `argument` is the path of the argument in the call, None for a tensor that the call made itself."""

    argument: str | None
    source: torch.dtype
    target: torch.dtype
    kept_layout: bool = True

    def __str__(self) -> str:
        return f"{self.argument or 'an intermediate'}: {_short(self.source)} to {_short(self.target)}"


def traced_casts(trace: OpTrace, call: partial[Any]) -> list[Cast]:
    """Return the casts in a trace of `call`, in their order.

    Autocast casts with `Tensor.to`, which is dispatched as `aten::_to_copy` of the very tensor that the caller passed;
    so an argument is known by its identity.
    """
    paths = {identity(tensor): path for path, tensor in arguments(call)}
    return [Cast(paths.get(one.tensor), one.source, one.target, one.kept_layout) for one in trace.conversions]


def alive(conversions: Iterable[Conversion]) -> list[torch.Tensor]:
    """Return the results of casts that something still holds: autocast's cache, or a graph."""
    return [result for one in conversions if (result := one.result()) is not None]


def arguments(call: partial[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `call` passes, each with its path: "1", "0[2]", "weight"."""
    yield from _walk([(str(index), value) for index, value in enumerate(call.args)])
    yield from _walk(list(call.keywords.items()))


def expected_casts(call: partial[Any], target: torch.dtype) -> list[Cast]:
    """Return the casts that bring every eligible argument to `target`, each exactly once.

    Eligible is what is floating and not float64 ("Op Eligibility" in the AMP op reference).
    """
    return [
        Cast(path, tensor.dtype, target)
        for path, tensor in arguments(call)
        if tensor.is_floating_point() and tensor.dtype not in (torch.float64, target)
    ]


def _walk(named: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, value in named:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (list, tuple)):
            yield from _walk([(f"{path}[{index}]", item) for index, item in enumerate(value)])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
