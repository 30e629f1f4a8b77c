"""How bytes are counted: saved for backward, alive after a step, and at the peak of an allocator."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _address(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class SavedForBackward:
    """Counts, while it is entered, the storages that autograd saves; `exclude` are tensors that live anyway.

    Views share a storage and count once. What is saved stays alive until the counter goes, so that no address is
    used twice. Only `save_for_backward`-style saves are seen (torch.autograd.graph.saved_tensors_hooks).
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self._excluded = list(exclude)
        self._known = {_address(tensor) for tensor in self._excluded}
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # A detached alias: a saved output must not hold the graph that holds it.
        alias = tensor.detach()
        if _address(tensor) not in self._known:
            self._kept.setdefault(_address(tensor), alias)
        return alias

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def storages(self) -> list[tuple[torch.dtype, int]]:
        """One (dtype, bytes) for each storage saved, in no promised order."""
        return [(kept.dtype, kept.untyped_storage().nbytes()) for kept in self._kept.values()]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(nbytes for _, nbytes in self.storages)


def bytes_by_dtype(storages: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Sum (dtype, bytes) pairs by dtype; the names are torch's, without the prefix, in order."""
    sums: Counter[str] = Counter()
    for dtype, nbytes in storages:
        sums[str(dtype).removeprefix("torch.")] += nbytes
    return dict(sorted(sums.items()))


class LiveStorages(TorchDispatchMode):
    """Knows every storage that an operation returned while it was entered, and which of them are still alive.

    It holds weak references to storages, not to Python tensors, so what a C++ cache or a graph keeps counts too, and
    neither the garbage collector nor a device's allocator is asked. Storages of `exclude` don't count.
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._excluded = [StorageWeakRef(tensor.untyped_storage()) for tensor in exclude]
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                # The address of a storage isn't reused while a weak reference to it is held.
                self._seen.setdefault(reference.cdata, (reference, storage.nbytes()))
        return result

    def _alive(self) -> Iterator[int]:
        excluded = {reference.cdata for reference in self._excluded}
        self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
        return (nbytes for key, (_, nbytes) in self._seen.items() if key not in excluded)

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages seen that something still holds."""
        return sum(self._alive())

    @property
    def live_storages(self) -> int:
        """How many of the storages seen something still holds."""
        return sum(1 for _ in self._alive())


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of `tensors` by dtype, elements times item size."""
    return bytes_by_dtype((tensor.dtype, tensor.numel() * tensor.element_size()) for tensor in tensors)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state that have its parameters' shapes (step counters are left out)."""
    return [
        value
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


def counts_peaks(module: ModuleType | None) -> bool:
    """Whether a device's module (`torch.cuda`) keeps a peak of allocated bytes that can be reset."""
    needed = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "synchronize")
    return all(hasattr(module, name) for name in needed)


def peak_above_start(
    module: Any, device: torch.device, step: Callable[[], None], leaves: Iterable[torch.Tensor]
) -> int:
    """Peak of allocated bytes during `step` above what was allocated before it.

    `step` runs once beforehand, so that the libraries' workspaces are made; the gradients of `leaves` are dropped
    before the measured run, which makes its own.
    """
    step()
    for leaf in leaves:
        leaf.grad = None
    # Garbage of earlier work that is collected during the step would be missing from the peak.
    gc.collect()
    module.synchronize()
    module.reset_peak_memory_stats(device)
    start = int(module.memory_allocated(device))
    step()
    module.synchronize()
    return int(module.max_memory_allocated(device)) - start


@dataclass(frozen=True)
class PeakBounds:
    """Between which figures, in bytes, the peak of one training step above its start must lie."""

    low: int
    high: int


ROUNDING = 1 << 21  # the CUDA allocator hands out blocks of up to 2 MiB for small requests


def peak_bounds(saved: int, parameters: int, low_weights: int, largest: int) -> PeakBounds:
    """Closed form for the peak of a forward and backward pass above the bytes that were allocated before it.

    `saved` are the bytes kept for backward, all alive at the end of the forward pass: the low end. The high end adds
    gradients of `parameters` bytes, the 16-bit copies of `low_weights` bytes that the region's cache holds and their
    16-bit gradients, three tensors of the `largest` size in flight (a gradient, its successor, and the workspace of a
    transposition or a cast), and the allocator's rounding.
    """
    return PeakBounds(saved, saved + parameters + 2 * low_weights + 3 * largest + ROUNDING)
