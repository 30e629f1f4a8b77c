"""Run an op on fake tensors of a device that this machine does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

# Messages of fake kernels that ask the driver which kernel the hardware would choose.
# The last one appears after something in the process initialized a device that does not exist.
_HARDWARE = re.compile(
    "NVIDIA driver|CUDA driver|not linked with support|not compiled with (CUDA|XPU)"
    r"|Could not run 'aten::empty\S*' with arguments from the '(CUDA|XPU)' backend"
)


def call_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`; where a fake kernel asks for missing hardware, what meta tensors give."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].device
    try:
        return func(*args, **kwargs)
    except (RuntimeError, AssertionError) as error:
        fake = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
        if not fake or _HARDWARE.search(str(error)) is None:
            raise
        return _on_meta(func, args, kwargs, fake[0].device)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Return what `func` returns on fake tensors of `device`, computed on meta tensors, which need no kernel choice."""

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
