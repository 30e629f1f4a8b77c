"""The floating-point types in which every op really ran, forward or backward, seen by a dispatch mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CAST = "aten::_to_copy"
# Ops that move or share data and compute nothing; gradients pass through them in any type.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "view", "_unsafe_view", "reshape", "t", "transpose", "permute"),
        *("expand", "squeeze", "unsqueeze", "as_strided", "ones_like", "zeros_like", "empty_like", "new_empty"),
        *("new_zeros", "new_empty_strided", "copy_", "fill_", "slice", "select", "_reshape_alias"),
    )
)


@dataclass(frozen=True)
class Op:
    """One dispatched op: its name without the overload, and the floating types of its tensors."""

    name: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]

    @property
    def computes(self) -> bool:
        """Whether it does arithmetic on floating-point numbers, a change of type aside."""
        return self.name != CAST and self.name not in BOOKKEEPING and bool(self.inputs)

    def __str__(self) -> str:
        return f"{self.name.removeprefix('aten::')}({_short(self.inputs)}) -> {_short(self.outputs) or 'no float'}"


class DtypeStream(TorchDispatchMode):
    """Record the ops below autograd and autocast while the mode is entered, but for questions about a tensor (prim).

    Autograd's worker threads inherit the mode from the thread that called backward, so the backward of an
    accelerator is seen too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the guard against it imports the compiler, and takes time at each op."""
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
        result = func(*args, **keywords)
        if func.namespace != "prim":
            self.ops.append(Op(func._schema.name, _floating((*args, *keywords.values())), _floating((result,))))
        return result

    @property
    def computing(self) -> list[Op]:
        """The ops that do arithmetic, in the order in which they ran."""
        return [op for op in self.ops if op.computes]

    @property
    def floating(self) -> list[Op]:
        """All ops that take or give floating-point numbers, moves of data and casts too, in their order."""
        return [op for op in self.ops if op.inputs or op.outputs]

    def casts(self, source: torch.dtype, to: torch.dtype) -> int:
        """How many times a tensor was cast from one floating type to another."""
        return sum(op.name == CAST and op.inputs == (source,) and op.outputs == (to,) for op in self.ops)


def stream_of(call: Callable[[], object]) -> DtypeStream:
    """Call `call` and return what ran."""
    with DtypeStream() as stream:
        call()
    return stream


def first_difference(seen: Sequence[Op], predicted: Sequence[Op]) -> str | None:
    """Say which op of a stream is the first that was predicted otherwise, and its place; None where there is none."""
    for place, (ours, theirs) in enumerate(itertools.zip_longest(seen, predicted), start=1):
        if ours != theirs:
            total = max(len(seen), len(predicted))
            return f"op {place} of {total} is {ours or 'missing'}, predicted: {theirs or 'none'}"
    return None


def _short(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _floating(values: Iterable[object]) -> tuple[torch.dtype, ...]:
    found: list[torch.dtype] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point:
                found.append(value.dtype)
        elif isinstance(value, (list, tuple)):
            found += _floating(value)
    return tuple(found)
