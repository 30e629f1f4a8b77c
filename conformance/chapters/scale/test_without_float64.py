"""Check GradScaler on fake tensors of a device that has no float64."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.policy.overloads import mode_of
from .support import on_fake_tensors, scale_dtype


class _Wide(TorchDispatchMode):
    """Notes the ops whose result has a float64 tensor of the device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.ops: list[str] = []
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64 and leaf.device.type == self._device_type:
                self.ops.append(str(func))
        return result


@contract("AMP-SCALE-190", on=("fake:mps", "torch.mps"))
def test_no_float64(case: Case, target: Target) -> None:
    with on_fake_tensors(case), mode_of(target):
        for dtype, new in itertools.product((torch.float32, torch.float16), (None, 8.0)):
            scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0)
            weight = torch.nn.Parameter(torch.zeros(3, device=target.device))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            weight.grad = torch.ones(3, device=target.device)
            with _Wide(target.device_type) as seen:
                scaler.scale(torch.ones(2, dtype=dtype, device=target.device))
                scaler.unscale_(optimizer)
                scaler.update(new)
            what = f"outputs of {dtype}, new scale {new}"
            case.equal(f"{what}: ops that make float64 tensors", seen.ops, [])
            case.equal(f"{what}: dtype of the scale", scale_dtype(scaler, target.device), torch.float32)
