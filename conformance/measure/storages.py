"""Count bytes: saved for backward, alive, and at the peak of live storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the record of a tensor's storage, which no other storage has while the tensor lives.

    That of its elements is zero for every tensor without any, and on a device that has none in this process.
    """
    return int(tensor.untyped_storage()._cdata)


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what tells the memory that a tensor lies in from that of others: its storage, and the place in it."""
    return storage_of(tensor), tensor.storage_offset()


Storage: TypeAlias = tuple[torch.dtype, int]
"""The type and bytes of a storage."""


class SavedForBackward:
    """Counts, while it is entered, the storages that autograd saves; `exclude` are tensors that live anyway.

    Views share a storage and count once. What is saved stays alive until the counter goes, so that no address is
    used twice. Only `save_for_backward`-style saves are seen (torch.autograd.graph.saved_tensors_hooks).
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self._excluded = list(exclude)
        self._known = {storage_of(tensor) for tensor in self._excluded}
        self._kept: dict[int, torch.Tensor] = {}
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # A detached alias: a saved output must not hold the graph that holds it.
        alias = tensor.detach()
        if storage_of(tensor) not in self._known:
            self._kept.setdefault(storage_of(tensor), alias)
        return alias

    def __enter__(self) -> SavedForBackward:
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        # Not kept: they hold the counter, which would then go only when the garbage collector comes.
        self._hooks.pop().__exit__(*error)

    @property
    def storages(self) -> list[tuple[torch.dtype, int]]:
        """One (dtype, bytes) for each storage saved, in no promised order."""
        return [(kept.dtype, kept.untyped_storage().nbytes()) for kept in self._kept.values()]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(nbytes for _, nbytes in self.storages)


def saved_by(run: Callable[..., torch.Tensor], operands: list[torch.Tensor]) -> list[tuple[torch.dtype, int]]:
    """Return one (dtype, bytes) for each storage, except the operands, that `run(*operands)` saves for backward."""
    with SavedForBackward(operands) as saved:
        run(*operands)
    return without_bookkeeping(saved.storages)


def bytes_by_dtype(storages: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Sum (dtype, bytes) pairs by dtype; the names are torch's, without the prefix, in order."""
    sums: Counter[str] = Counter()
    for dtype, nbytes in storages:
        sums[str(dtype).removeprefix("torch.")] += nbytes
    return dict(sorted(sums.items()))


def without_bookkeeping(storages: Iterable[tuple[torch.dtype, int]]) -> list[tuple[torch.dtype, int]]:
    """Leave out what a library keeps for itself: reserves, which are bytes, the states of random generators, nothing.

    cuDNN's batch norm keeps its reserve as uint8, the fused attention kernels seed and offset as one integer each.
    """
    return [(dtype, nbytes) for dtype, nbytes in storages if nbytes and not _bookkeeping(dtype, nbytes)]


def without_masks(seen: Iterable[Storage], expected: Iterable[Storage]) -> list[Storage]:
    """Return `seen` as if each bool mask that is not expected were the floating-point tensor that it replaces.

    A kernel may save which elements it lets through, a byte each, in place of a result or beside one that another
    operation saves. A mask of another number of elements than any expected floating-point tensor stays.
    """
    expected = list(expected)
    surplus, missing = Counter(seen), Counter(expected)
    surplus, missing = surplus - missing, missing - surplus
    kept = list((Counter(expected) - missing).elements())
    for dtype, nbytes in surplus.elements():
        masked = [one for one in expected if dtype is torch.bool and _elements(*one) == nbytes]
        replaced = next((one for one in masked if missing[one]), None)
        if replaced is not None:
            missing[replaced] -= 1
            kept.append(replaced)
        elif not masked:
            kept.append((dtype, nbytes))
    return kept


def _elements(dtype: torch.dtype, nbytes: int) -> int | None:
    return nbytes // dtype.itemsize if dtype.is_floating_point else None


def _bookkeeping(dtype: torch.dtype, nbytes: int) -> bool:
    whole = not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
    return dtype is torch.uint8 or (whole and nbytes <= 16)


class LiveStorages(TorchDispatchMode):
    """Knows every storage that an operation returned while it was entered, and which of them are still alive.

    It holds weak references to storages, not to Python tensors, so what a C++ cache or a graph keeps counts too, and
    neither the garbage collector nor a device's allocator is asked. Storages of `exclude` don't count.
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        # The address of a storage isn't reused while a weak reference to it is held.
        self._excluded = {ref.cdata: ref for ref in (StorageWeakRef(tensor.untyped_storage()) for tensor in exclude)}
        self._seen: dict[int, tuple[StorageWeakRef, tuple[torch.dtype, int]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch's own check imports the compiler at each op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                address = storage._cdata
                if address not in self._seen and address not in self._excluded:
                    self._seen[address] = StorageWeakRef(storage), (leaf.dtype, storage.nbytes())
        return result

    @property
    def storages(self) -> list[tuple[torch.dtype, int]]:
        """One (dtype, bytes) for each storage seen that something still holds, in the order in which they were seen."""
        for address in [address for address, (reference, _) in self._seen.items() if reference.expired()]:
            del self._seen[address]
        return [storage for _, storage in self._seen.values()]

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages seen that something still holds."""
        return sum(nbytes for _, nbytes in self.storages)

    @property
    def live_storages(self) -> int:
        """How many of the storages seen something still holds."""
        return len(self.storages)


class PeakStorages(LiveStorages):
    """Knows as well the most bytes that were alive after any operation: an allocator without rounding.

    What a kernel takes and gives back inside one operation is not seen, so that every device and build counts alike.
    """

    peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self.counted_bytes)
        return result

    @property
    def counted_bytes(self) -> int:
        """Bytes alive, without the bookkeeping of libraries."""
        return sum(nbytes for _, nbytes in without_bookkeeping(self.storages))


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return bytes of `tensors` by dtype, elements times item size."""
    return bytes_by_dtype((tensor.dtype, tensor.numel() * tensor.element_size()) for tensor in tensors)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state that have its parameters' shapes (step counters are left out)."""
    return [
        value
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
