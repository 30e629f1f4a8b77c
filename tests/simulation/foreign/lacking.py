"""What the backend cannot do with this module imported too: name dimensions, make jagged tensors, as torch_xla 2.9."""

from __future__ import annotations

from typing import Any

import torch

from tests.simulation.foreign.toyacc import NAME

_refine_names, _nested_tensor = getattr(torch.Tensor, "refine_names", None), torch.nested.nested_tensor


def _named(self: torch.Tensor, *names: Any) -> torch.Tensor:
    if self.device.type == NAME:
        raise RuntimeError("NYI: named tensors only support CPU, CUDA, XPU or privateuseone tensors.")
    assert _refine_names is not None
    return _refine_names(self, *names)


def _jagged(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    if any(tensor.device.type == NAME for tensor in tensors):
        raise AttributeError("'NestedIntNode' object has no attribute 'expect_size'")
    return _nested_tensor(tensors, **options)


if _refine_names is not None:  # torch has no named dimensions any more
    setattr(torch.Tensor, "refine_names", _named)  # noqa: B010
setattr(torch.nested, "nested_tensor", _jagged)  # noqa: B010
