"""How operations are counted: by name, as they reach the device, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

CAST = "_to_copy"
READ = "_local_scalar_dense"  # what .item() comes down to: the host waits for the device

# Operations that move no element: views, and marks for the profiler.
_FREE = {"detach", "t", "transpose", "view", "_unsafe_view", "expand", "alias", "as_strided", "unsqueeze", "squeeze"}


class CountedOperations(TorchDispatchMode):
    """Counts, while it is entered, the operations below autograd and autocast by their names in aten."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "aten":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def casts(self) -> int:
        """Copies into another dtype or device."""
        return self.counts[CAST]

    @property
    def reads(self) -> int:
        """Values that the host read back from a tensor, waiting for the device."""
        return self.counts[READ]

    @property
    def work(self) -> dict[str, int]:
        """Counts of what computes: neither views nor casts, sorted by name."""
        return {name: count for name, count in sorted(self.counts.items()) if name not in {*_FREE, CAST}}
