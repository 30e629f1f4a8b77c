"""Counts the casts that a weight goes through below autocast."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A cast arrives as `_to_copy`, and in inference mode as the undecomposed `to`.
_CASTS = (torch.ops.aten._to_copy, torch.ops.aten.to)


class WeightCasts(TorchDispatchMode):
    """While active, counts the casts of one tensor to another dtype; does not keep their results alive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the guard against it, from torch 2.11 on, imports the compiler."""
        return False

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight
        self._results: list[weakref.ref[torch.Tensor]] = []

    @property
    def count(self) -> int:
        """How often the weight has been cast so far."""
        return len(self._results)

    def alive(self) -> list[torch.Tensor]:
        """The results of casts that something still holds: autocast's cache, or a graph."""
        return [result for reference in self._results if (result := reference()) is not None]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _CASTS and args[0] is self._weight and result.dtype is not self._weight.dtype:
            self._results.append(weakref.ref(result))
        return result
