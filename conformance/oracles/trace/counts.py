"""How operations are counted: by name, as they reach the device, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CAST = "_to_copy"
# What .item() comes down to, and operations whose result has a shape or a truth that the host has to know: it waits.
READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}

# Operations that move no element: views, marks for the profiler, questions about types.
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


class CountedOperations(TorchDispatchMode):
    """Counts, while it is entered, the operations below autograd and autocast by their names in aten.

    With `least` only those that take a tensor of at least so many elements.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._least = least

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "aten" and (not self._least or self._large((args, kwargs))):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def _large(self, arguments: Any) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf.numel() >= self._least for leaf in tree_leaves(arguments))

    @property
    def casts(self) -> int:
        """Copies into another dtype or device."""
        return self.counts[CAST]

    @property
    def reads(self) -> int:
        """Values that the host read back from a tensor, waiting for the device."""
        return sum(self.counts[name] for name in READS)

    @property
    def work(self) -> dict[str, int]:
        """Counts of what computes: neither views nor casts, sorted by name."""
        return {name: count for name, count in sorted(self.counts.items()) if name not in {*_FREE, CAST}}


# Functions of Python that give the host what a tensor holds. Of a tensor of the CPU some look at its memory at once,
# and nothing reaches the dispatcher.
_TELLING = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "allclose", "equal", "nonzero", "unique"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "__contains__"),
    *("__repr__", "__format__", "__reduce_ex__", "__deepcopy__"),
}


class HostReads(TorchFunctionMode):
    """Counts, while it is entered, the calls in Python that give the host what a tensor holds, by name.

    A copy to "cpu", called so, counts unless it does not block; outside of the mode's own thread nothing does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        to_the_host = name == "to" and "cpu" in (*args[1:2], keywords.get("device"))
        if name in _TELLING or (to_the_host and not keywords.get("non_blocking")):
            self.counts[name] += 1
        return func(*args, **keywords)
