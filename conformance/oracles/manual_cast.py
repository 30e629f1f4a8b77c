"""Manual autocast: the inputs of every function call are cast as the op lists say, with autocast off."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .cast_order import CastOrder
from .policy import declared, overloads
from .policy.declaration import Undetermined
from .policy.lists import (
    Listing,
    backend_of,
    by_surface,
    declared_policies,
    eligible,
    listings,
    resolved,
    run_dtype,
    sets_dtype,
)
from .trace.reached import reached

# Functions without a policy of their own that do nothing but call one listed op.
_CALLS = {"nll_loss_nd": "nll_loss", "__rmatmul__": "matmul"}
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class ManualCast(TorchFunctionMode):
    """Run a program as autocast regions on `device_type` would, by casts of its inputs and without autocast.

    Entered itself, it is a region of `amp_dtype`; `region` opens one, nested or not. Each call of an ATen op from
    Python is looked up in the op lists by its name; eligible inputs (floating, of the device, not float64: "Op
    Eligibility" of the op reference) are cast with `Tensor.to`, or fp32 is asked for where autocast does that.
    Functions written in Python are followed into their body. With `cache` a float32 leaf that requires a gradient is
    cast once, where gradients are recorded; `copies` holds those casts, until the outermost region ends. Ops that C++
    makes of listed ones without a policy of their own (`torch.lstm`) are not followed, but for `cross_entropy`.

    Where other rules hold on the device than its backend lists (a surface, MPS), a call raises Undetermined whose rule
    depends on the overload, or which is made of ops with rules and has none itself.

    `order` says in which order the inputs of one op are cast; without it they are cast from the first to the last.
    """

    def __init__(
        self,
        device_type: str,
        amp_dtype: torch.dtype | None = None,
        *,
        cache: bool = True,
        order: CastOrder | None = None,
    ) -> None:
        super().__init__()
        self.copies: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}  # with the weight: its id
        self._device_type, self._cache_enabled, self._order = device_type, cache, order
        self._amp_dtypes = [amp_dtype]
        # Other backends list what CUDA does, or less of it.
        backend = backend_of(device_type)
        self._changed = declared.changed(device_type)
        self._policies = _by_surface(_policies(backend), device_type) if self._changed else _policies(backend)
        self._ruled = overloads.ruled(device_type) if self._changed else frozenset()
        self._bodies: dict[types.FunctionType, Callable[..., Any]] = {}
        self._entered: list[types.FunctionType] = []

    @contextlib.contextmanager
    def region(self, amp_dtype: torch.dtype | None) -> Iterator[None]:
        """Open a region of `amp_dtype` (None: a disabled one), perhaps inside another of this object."""
        outermost = len(self._amp_dtypes) == 1
        self._amp_dtypes.append(amp_dtype)
        try:
            with self if outermost else contextlib.nullcontext():
                yield
        finally:
            self._amp_dtypes.pop()
            if outermost:
                self.copies.clear()

    def __torch_function__(
        self, func: Any, types_: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords, amp_dtype = kwargs or {}, self._amp_dtypes[-1]
        if amp_dtype is None:
            return func(*args, **keywords)
        # A method in Python that calls the one of its own name in C++ (`Tensor.unflatten`) is met twice.
        if isinstance(func, types.FunctionType) and func not in self._entered:
            self._entered.append(func)
            try:
                with self:
                    return self._body(func)(*args, **keywords)
            finally:
                self._entered.pop()
        name = getattr(func, "__name__", "").split(".")[0]  # an overload of torch.ops.aten is named "mm.default"
        listing = self._policies.get(_CALLS.get(name, name))
        if listing is None and name == "cross_entropy_loss" and _of_classes(*args):
            with self:
                return _cross_entropy(*args)
        if listing is None or keywords.get("out") is not None:
            return self._plainly(func, name, args, keywords)
        if listing is _UNDETERMINED:
            raise Undetermined(f"{declared.source_of_rules(self._device_type)} has no one rule of a list for {name}")
        if sets_dtype(listing):
            return self._asking_for_fp32(func, args, keywords)
        found = [leaf.dtype for leaf in tree_leaves((args, keywords)) if eligible(leaf, self._device_type)]
        if not found:
            return func(*args, **keywords)
        to = run_dtype(listing.policy, found, amp_dtype)
        values = [*args, *keywords.values()]
        places = [index for index, value in enumerate(values) if self._to_cast(to, value)]
        if self._order is not None:
            places = self._order.of(name, partial(func, *args, **keywords), places)
        for index in places:  # inside a list the tensors are cast in their order, whatever the order of the inputs
            values[index] = tree_map(partial(self._cast, to), values[index])
        return func(*values[: len(args)], **dict(zip(keywords, values[len(args) :], strict=True)))

    def _plainly(self, func: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function without a policy; raise where it is made of ops that have one."""
        if not self._changed:
            return func(*args, **keywords)
        try:
            with reached(self._ruled, self._ruled) as ops:
                return func(*args, **keywords)
        finally:
            if ops:  # also where types that no rule made alike are refused
                raise Undetermined(
                    f"{declared.source_of_rules(self._device_type)} has no rule for {name}, "
                    f"and rules for ops that it is made of ({', '.join(sorted(ops))})"
                )

    def _asking_for_fp32(self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What autocast does for an op that takes a dtype: none is given, and the first input is eligible."""
        given = keywords.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
        if given or not eligible(args[0] if args else next(iter(keywords.values())), self._device_type):
            return func(*args, **keywords)
        return func(*args, **{**keywords, "dtype": torch.float32})

    def _to_cast(self, to: torch.dtype, value: Any) -> bool:
        return any(eligible(leaf, self._device_type) and leaf.dtype != to for leaf in tree_leaves(value))

    def _cast(self, to: torch.dtype, value: Any) -> Any:
        if not eligible(value, self._device_type) or value.dtype == to:
            return value
        weight = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype == torch.float32
        if not (self._cache_enabled and weight and to == self._amp_dtypes[-1] and torch.is_grad_enabled()):
            return value.to(to)
        if (id(value), to) not in self.copies:
            self.copies[id(value), to] = value, value.to(to)
        return self.copies[id(value), to][1]

    def _body(self, func: types.FunctionType) -> Callable[..., Any]:
        """`func` without its own check for modes, so that what it calls comes back here and it does not."""
        if func not in self._bodies:
            names = {**func.__globals__, **dict.fromkeys(_CHECKS, _no)}
            cells = tuple(types.CellType() for _ in func.__closure__ or ())
            body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, cells)
            body.__kwdefaults__ = func.__kwdefaults__
            self._bodies[func] = body
            # A wrapper calls, by a global name or out of its closure, a function that makes the same check again.
            for name in func.__code__.co_names:
                value = func.__globals__.get(name)
                if isinstance(value, types.FunctionType) and not value.__globals__.keys().isdisjoint(_CHECKS):
                    names[name] = self._body(value)
            for cell, outer in zip(cells, func.__closure__ or (), strict=True):
                value = outer.cell_contents
                cell.cell_contents = self._body(value) if isinstance(value, types.FunctionType) else value
        return self._bodies[func]


def _of_classes(logits: torch.Tensor, target: torch.Tensor, *options: Any) -> bool:
    """Whether this cross entropy is of class numbers, without label smoothing."""
    return not target.is_floating_point() and (len(options) < 4 or options[3] == 0)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor, *options: Any) -> torch.Tensor:
    """Call what `at::cross_entropy_loss` is made of (aten/src/ATen/native/LossNLL.cpp)."""
    chances = torch.log_softmax(logits, min(1, logits.dim() - 1), logits.dtype)
    loss: torch.Tensor = torch._C._nn.nll_loss_nd(chances, target, *options[:3])
    return loss


def _no(*_: object) -> bool:
    return False


# Stands for the policy of an op that the rules of a surface leave open.
_UNDETERMINED = Listing("", "", "", "undetermined", "declared", "")


def _by_surface(policies: dict[str, Listing], device_type: str) -> dict[str, Listing]:
    """The policies of a backend as the surface that is declared for a device type has them."""
    changed = declared.changed(device_type)
    added = {op: Listing(op, op, backend_of(device_type), "unlisted", "declared", "") for op in changed}
    found: dict[str, Listing] = {}
    for name, row in {**added, **policies}.items():
        ops = (name,) if name in resolved(row.name) else resolved(row.name)
        kept = by_surface(row, device_type, ops)
        if kept is not None:
            found[name] = kept
        elif any(declared_policies(op, device_type) != {"unlisted"} for op in ops):
            found[name] = _UNDETERMINED
    return found


@functools.cache
def _policies(backend: str) -> dict[str, Listing]:
    """The listing of each ATen op, and of each documented name, that some list of `backend` has."""
    rows = [row for row in listings(backend) if row.policy not in ("unlisted", "banned")]
    by_name = {row.name: row for row in rows}
    for row in by_name.copy().values():
        for name in resolved(row.name):
            by_name.setdefault(name, row)
    return by_name
