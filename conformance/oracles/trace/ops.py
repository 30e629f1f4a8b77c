"""Trace of the ops that are dispatched below autograd and autocast: names, floating-point types and casts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .fake_kernels import call_op

CAST = "aten::_to_copy"
# In inference mode a cast is dispatched as the undecomposed `to`.
_CASTS = (CAST, "aten::to")
# Ops that move or share data and compute nothing; gradients pass through them in any type.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "view", "_unsafe_view", "reshape", "t", "transpose", "permute"),
        *("expand", "squeeze", "unsqueeze", "as_strided", "ones_like", "zeros_like", "empty_like", "new_empty"),
        *("new_zeros", "new_empty_strided", "copy_", "fill_", "slice", "select", "_reshape_alias"),
    )
)
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::linear"})

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def identity(tensor: torch.Tensor) -> int:
    """Return the address by which a trace knows a tensor, which is unique among the tensors that are alive.

    Below the functionalization of a backend such as XLA, ops get the tensor that the caller's one wraps. The object of
    Python for that one may be made after the trace, with the `id` of one that is gone: the address is torch's.
    """
    if type(tensor) not in _PLAIN:
        return id(tensor)
    if not torch._is_functional_tensor(tensor):
        return tensor._cdata
    torch._sync(tensor)  # what a view of an updated tensor wraps is made anew at its next use
    return torch._from_functional_tensor(tensor)._cdata


@dataclass(frozen=True)
class Conversion:
    """A tensor's copy in another dtype; neither is kept alive.

    `tensor` is an `identity`, `result` a weak reference.
    """

    tensor: int
    source: torch.dtype
    target: torch.dtype
    kept_layout: bool
    result: weakref.ref[torch.Tensor]


@dataclass(frozen=True)
class Op:
    """One dispatched op: its name without the overload, and the floating types of its tensors.

    `elements` is the size of its largest argument, `products` how many products of two matrices it makes. Ops are equal
    if their names and types are.
    """

    name: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    elements: int = field(default=0, compare=False)
    products: int = field(default=0, compare=False)
    conversion: Conversion | None = field(default=None, compare=False)

    @property
    def computes(self) -> bool:
        """Whether it does arithmetic on floating-point numbers, a change of type aside."""
        return self.name not in _CASTS and self.name not in BOOKKEEPING and bool(self.inputs)

    @property
    def multiplies(self) -> bool:
        """Whether it makes products of matrices, of two or of batches."""
        return self.products > 0 or "mm" in self.name

    def __str__(self) -> str:
        return f"{self.name.removeprefix('aten::')}({_short(self.inputs)}) -> {_short(self.outputs) or 'no float'}"


class OpTrace(TorchDispatchMode):
    """Record the ops below autograd and autocast while the mode is entered, but for queries of a tensor (prim).

    Enter it inside the fake mode if any; fake kernels that ask for missing hardware are replaced. A trace compares
    tensors by `identity`: keep those alive that you ask it about. Autograd's worker threads inherit the mode from the
    thread that called backward, so the backward of an accelerator is recorded too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the guard against it, from torch 2.11 on, imports the compiler."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        result = call_op(func, args, keywords)
        if func.namespace != "prim":
            self.ops.append(_recorded(_unfunctional(func._schema.name), args, keywords, result))
        return result

    @property
    def computing(self) -> list[Op]:
        """The ops that do arithmetic, in the order in which they ran."""
        return [op for op in self.ops if op.computes]

    @property
    def matrix_products(self) -> list[Op]:
        """The products of two matrices, in their order; an op that makes several stands there as often."""
        return [op for op in self.ops for _ in range(op.products)]

    @property
    def floating(self) -> list[Op]:
        """All ops that take or give floating-point numbers, moves of data and casts too, in their order."""
        return [op for op in self.ops if op.inputs or op.outputs]

    @property
    def conversions(self) -> list[Conversion]:
        """All changes of dtype, in their order."""
        return [op.conversion for op in self.ops if op.conversion is not None]

    def casts(self, source: torch.dtype, to: torch.dtype) -> int:
        """Return how many times a tensor was cast from one type to another."""
        return sum((one.source, one.target) == (source, to) for one in self.conversions)

    def casts_of(self, tensor: torch.Tensor) -> list[Conversion]:
        """Return the casts of one tensor, which must have been alive all the time."""
        return [one for one in self.conversions if one.tensor == identity(tensor)]


def trace_of(call: Callable[[], object]) -> OpTrace:
    """Call `call` and return what ran."""
    with OpTrace() as trace:
        call()
    return trace


def first_difference(seen: Sequence[Op], predicted: Sequence[Op]) -> str | None:
    """Say which op of a sequence is the first that was predicted otherwise, and its place; None where there is none."""
    for place, (ours, theirs) in enumerate(itertools.zip_longest(seen, predicted), start=1):
        if ours != theirs:
            total = max(len(seen), len(predicted))
            return f"op {place} of {total} is {ours or 'missing'}, predicted: {theirs or 'none'}"
    return None


def _unfunctional(name: str) -> str:
    """Return the name of the view that functionalization replaced by a copy: `aten::t` for `aten::t_copy`."""
    view = name.removesuffix("_copy")
    return view if view in BOOKKEEPING else name


def _products(name: str, args: tuple[Any, ...]) -> int:
    """Count the products of two matrices: a device may have kernels of linear and of its backward, as MPS has."""
    if name == "aten::linear_backward":
        return int(args[3][0]) + int(args[3][1])  # the gradients of input and weight that are asked for
    return int(name in MATRIX_PRODUCTS)


def _recorded(name: str, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> Op:
    given = list(_tensors((*args, *keywords.values())))
    conversion = None
    if name in _CASTS and result.dtype != args[0].dtype:
        kept = _strides(result) == _strides(args[0])
        conversion = Conversion(identity(args[0]), args[0].dtype, result.dtype, kept, weakref.ref(result))
    elements = max((tensor.numel() for tensor in given), default=0)
    return Op(name, _floating(given), _floating(_tensors((result,))), elements, _products(name, args), conversion)


def _strides(tensor: torch.Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _floating(tensors: Iterable[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(dtype for tensor in tensors if (dtype := tensor.dtype).is_floating_point)


def _short(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
