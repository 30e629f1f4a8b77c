"""Record the calls of lower-precision ops in a program with the dtype that each returned."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...oracles.policy.lists import eligible, listings, resolved


@dataclass(frozen=True)
class Lowered:
    """One call of an op on the lower-precision list: its number, its name, the type that it returned and that promised.

    What is promised is the type of the innermost region; outside any, nothing (None).
    """

    number: int
    name: str
    dtype: torch.dtype
    promised: torch.dtype | None

    def __str__(self) -> str:
        return f"call {self.number}, {self.name}: {str(self.dtype).removeprefix('torch.')}"


class ListedCalls(TorchFunctionMode):
    """Record each call from Python of an op on the lower-precision list of `device_type`.

    `inside` are those made where autocast was on for the device, `outside` those where it was off (the program may
    switch it off for a part of its own) on float32. A call whose floating inputs are all float64, or on another device,
    is left out: autocast does not touch it ("Op Eligibility" of the AMP op reference). What a Python function of torch
    calls in its body is not seen.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.inside: list[Lowered] = []
        self.outside: list[Lowered] = []
        self._device_type = device_type
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").split(".")[0]
        self._calls += 1
        found = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if eligible(leaf, self._device_type)]
        if name not in _lowered(self._device_type) or not found:
            return result
        on = torch.is_autocast_enabled(self._device_type)
        if on or set(found) == {torch.float32}:
            promised = torch.get_autocast_dtype(self._device_type) if on else None
            (self.inside if on else self.outside).extend(
                Lowered(self._calls, name, leaf.dtype, promised)
                for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            )
        return result


@functools.cache
def _lowered(backend: str) -> frozenset[str]:
    names = [row.name for row in listings(backend, "lower_precision")]
    return frozenset(names) | {op for name in names for op in resolved(name)}
