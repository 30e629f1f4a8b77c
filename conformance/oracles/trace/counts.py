"""Counts of a trace's ops by name, and of the Python calls that read a tensor's values on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .ops import CAST, Op

_CASTS = ("_to_copy", "to")
# `.item()` is dispatched as the first. The others have a result whose shape or truth the host has to know: it waits.
_READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal")

# Ops that move no element: views, marks for the profiler, questions about types.
_FREE = {
    "promote_types",
    "detach",
    "t",
    "transpose",
    "view",
    "_unsafe_view",
    "expand",
    "alias",
    "as_strided",
    "unsqueeze",
    "squeeze",
}


def by_name(ops: Iterable[Op], least: int = 0) -> Counter[str]:
    """Count ops of aten by name; with `least` only those that take a tensor of at least so many elements."""
    return Counter(
        op.name.removeprefix("aten::") for op in ops if op.name.startswith("aten::") and op.elements >= least
    )


def casts(ops: Iterable[Op]) -> int:
    """Count copies into another dtype or device."""
    return sum(op.conversion is not None or op.name == CAST for op in ops)


def reads(ops: Iterable[Op]) -> int:
    """Count the values that the host read from a tensor, waiting for the device."""
    counted = by_name(ops)
    return sum(counted[name] for name in _READS)


def work(ops: Iterable[Op], least: int = 0) -> dict[str, int]:
    """Count what computes, neither views nor casts, sorted by name."""
    return {name: count for name, count in sorted(by_name(ops, least).items()) if name not in {*_FREE, *_CASTS}}


# Functions of Python that give the host what a tensor holds. Of a tensor of the CPU some look at its memory at once,
# and nothing reaches the dispatcher.
_TELLING = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "allclose", "equal", "nonzero", "unique"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "__contains__"),
    *("__repr__", "__format__", "__reduce_ex__", "__deepcopy__"),
}


class HostReads(TorchFunctionMode):
    """Counts, while it is entered, the calls in Python that give the host what a tensor holds, by name.

    A copy to "cpu", called so, counts unless it does not block; what is made of such copies alone is on the host
    already. Outside of the mode's own thread nothing counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._on_the_host: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        known = bool(given) and all(id(tensor) in self._on_the_host for tensor in given)
        copies = name == "to" and "cpu" in (*args[1:2], keywords.get("device")) and not keywords.get("non_blocking")
        if copies or (name in _TELLING and not known):
            self.counts[name] += 1
        result = func(*args, **keywords)
        if copies or name == "cpu" or known:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._on_the_host |= {id(tensor): tensor for tensor in made}
        return result
