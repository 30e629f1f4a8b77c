"""Symbolic execution of an autocast region: tensors without elements, their casts, the tensors that nodes save."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from ..policy.lists import backend_of, listings

LOW, FP32, WIDEST, KEEP = "lower_precision", "fp32", "widest", "input's own"

# cross_entropy is on the CPU list under the name of its ATen op. The other lists name it, but register log_softmax and
# nll_loss alone, of which it is made (aten/src/ATen/native/LossNLL.cpp): its rule here makes their casts.
_NAMES = {
    "cpu": {"cross_entropy": "cross_entropy_loss"},
    **{key: {"square": "pow"} for key in ("cuda", "xpu")},  # which is what it calls
}
_PARTS = {"cuda": ("cross_entropy",), "xpu": ("cross_entropy",)}


@dataclass(frozen=True)
class Saved:
    """One storage that backward needs; role is `activation`, `weight copy` or `input copy`."""

    role: str
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Value:
    """A symbolic tensor: `storage` is shared by views, `leaf` is its role if it is an input."""

    storage: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    leaf: str = ""
    role: str = "activation"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """One node of the graph: the inputs that get a gradient, the result, and the tensors saved for backward.

    `passes` says that the gradient of each input is that of the result itself, or a view of it.
    """

    inputs: tuple[Value, ...]
    result: Value
    saved: tuple[Value, ...]
    passes: bool = False


class SymbolicRegion:
    """The state of one region: weight copies in its cache, nodes in the order in which they were made, casts."""

    def __init__(self, device_type: str, amp_dtype: torch.dtype | None, cache: bool) -> None:
        self.device_type = device_type
        self.amp_dtype = amp_dtype
        self.cache = cache
        self.copies: dict[str, Value] = {}
        self.saved: dict[str, Saved] = {}
        self.nodes: list[Node] = []
        self.made: dict[str, Value] = {}  # every storage that came to be, by name
        self.casts = [0, 0]
        self.calls: list[tuple[str, tuple[Value, ...], dict[str, int]]] = []

    def op(
        self,
        inputs: tuple[Value, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        saves: tuple[Value, ...] = (),
        saves_result: bool = False,
        passes: bool = False,
        role: str = "activation",
    ) -> Value:
        """Record an operation and return its result; without an input that requires a gradient it keeps nothing."""
        gets = tuple(value for value in inputs if value.grad)
        result = self.fresh(shape, dtype, bool(gets), role)
        saved = (*saves, result) if saves_result else saves
        if gets:
            self._record(Node(gets, result, saved, passes))
        return result

    def view(self, value: Value, shape: tuple[int, ...], *, passes: bool = True) -> Value:
        """Return `value` in another shape, of the same storage."""
        result = replace(value, shape=shape, leaf="")
        if value.grad:
            self._record(Node((value,), result, (), passes))
        return result

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, grad: bool = False, role: str = "activation") -> Value:
        """Make a tensor of its own storage that no node has for its result."""
        result = Value(f"#{len(self.made)}", shape, dtype, grad, role=role)
        self.made[result.storage] = result
        return result

    def _record(self, node: Node) -> None:
        self.nodes.append(node)
        for value in node.saved:
            # What came from outside lives anyway.
            if value.storage in self.made:
                whole = self.made[value.storage]
                self.saved[value.storage] = Saved(whole.role, whole.dtype, whole.elements)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a copy in `dtype`; the cache serves fp32 leaves that require a gradient, and nothing else."""
        if value.dtype == dtype or not value.dtype.is_floating_point:
            return value
        cacheable = self.cache and bool(value.leaf) and value.grad and dtype == self.amp_dtype
        if cacheable and value.storage in self.copies:
            return self.copies[value.storage]
        role = {"parameter": "weight copy", "input": "input copy"}.get(value.leaf, "activation")
        copy = self.op((value,), value.shape, dtype, role=role)
        self.casts[0] += 1
        self.casts[1] += value.grad
        if cacheable:
            self.copies[value.storage] = copy
        return copy

    def arguments(self, op: str, values: list[Value]) -> list[Value]:
        """Cast what an operation is given as its list says."""
        policy = policy_of(op, self.device_type)
        if self.amp_dtype is None or policy == KEEP:
            return values
        dtype = {LOW: self.amp_dtype, FP32: torch.float32, WIDEST: widest(*values)}[policy]
        return [self.cast(value, dtype) for value in values]


def widest(*values: Value) -> torch.dtype:
    """Return the type that torch promotes to: an operation that is on no list, or on that of the widest type."""
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype


def policy_of(op: str, device_type: str) -> str:
    """Return the list that an operation is on in the op reference; other accelerators share the list of CUDA."""
    backend = backend_of(device_type)
    name = _NAMES.get(backend, {}).get(op, op)
    if name in _PARTS.get(backend, ()):
        return KEEP
    return next((listed for listed in (LOW, FP32, WIDEST) if name in _listed(backend, listed)), KEEP)


@functools.cache
def _listed(backend: str, policy: str) -> frozenset[str]:
    return frozenset(listing.name for listing in listings(backend, policy))
