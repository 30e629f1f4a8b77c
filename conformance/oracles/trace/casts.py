"""The casts that really happen during a call: of which argument, from which type, to which, how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Cast:
    """One cast; `argument` is the path of the argument in the call, None for a tensor that the call made itself."""

    argument: str | None
    source: torch.dtype
    target: torch.dtype
    kept_layout: bool = True

    def __str__(self) -> str:
        return f"{self.argument or 'an intermediate'}: {_short(self.source)} to {_short(self.target)}"


class CastTrace(TorchDispatchMode):
    """Records every change of dtype that reaches the dispatcher below autocast.

    Autocast casts with `Tensor.to`, which arrives here as `aten::_to_copy` of the very tensor that the caller passed;
    so an argument is known by its identity. Enter it inside the autocast region, and inside the fake mode if any.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the guard against it, from torch 2.11 on, imports the compiler."""
        return False

    def __init__(self, call: partial[Any]) -> None:
        super().__init__()
        self.casts: list[Cast] = []
        self._call = call  # holds the arguments, so that none of their ids is used again
        self._paths = {id(tensor): path for path, tensor in arguments(call)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:
            fake = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
            if not fake or _HARDWARE.search(str(error)) is None:
                raise
            return _without_hardware(func, args, kwargs, fake[0].device)
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            kept = result.stride() == args[0].stride()
            self.casts.append(Cast(self._paths.get(id(args[0])), args[0].dtype, result.dtype, kept))
        return result

    def pairs(self) -> Counter[tuple[torch.dtype, torch.dtype]]:
        """Count all casts by their types alone."""
        return Counter((cast.source, cast.target) for cast in self.casts)


def arguments(call: partial[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `call` passes, each with its path: "1", "0[2]", "weight"."""
    yield from _walk([(str(index), value) for index, value in enumerate(call.args)])
    yield from _walk(list(call.keywords.items()))


def expected_casts(call: partial[Any], target: torch.dtype) -> list[Cast]:
    """Return the casts that bring every eligible argument to `target`, each exactly once.

    Eligible is what is floating and not float64 ("Op Eligibility" in the AMP op reference).
    """
    return [
        Cast(path, tensor.dtype, target)
        for path, tensor in arguments(call)
        if tensor.is_floating_point() and tensor.dtype not in (torch.float64, target)
    ]


def _walk(named: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, value in named:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (list, tuple)):
            yield from _walk([(f"{path}[{index}]", item) for index, item in enumerate(value)])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What fake kernels say that ask the driver which kernel the hardware would choose, where there is none.
# The last: what says so once something in the process has gone past the initialisation of a device that is not there.
_HARDWARE = re.compile(
    "NVIDIA driver|CUDA driver|not linked with support|not compiled with (CUDA|XPU)"
    r"|Could not run 'aten::empty\S*' with arguments from the '(CUDA|XPU)' backend"
)


def _without_hardware(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """What `func` returns on fake tensors of `device`, found on meta tensors, for which nothing is chosen."""

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    with unset_fake_temporarily():
        result = _SHAPES.get(func, func)(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    return tree_map(back, result)


def _fused_gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])


# A fused kernel that has no shape function before torch 2.15.
_SHAPES: dict[Any, Callable[..., Any]] = {torch.ops.aten._thnn_fused_gru_cell.default: _fused_gru_cell}
