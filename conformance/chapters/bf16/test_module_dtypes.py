"""Check which parameters and buffers of a module a conversion to another floating-point type converts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ...harness.check import Case, contract
from ...harness.targets import Target

CALLS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
KINDS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool),
)


class _Holder(nn.Module):
    """A parameter of each floating-point and complex type, and a buffer of every type, in two levels."""

    def __init__(self, kinds: list[torch.dtype], device: torch.device) -> None:
        super().__init__()
        self.inner = nn.Module()
        for place, dtype in enumerate(kinds):
            # 257 and 1 + 2^-20 are numbers that a 16-bit type has not.
            values = torch.tensor([257, 1], device=device).to(dtype)
            if dtype.is_floating_point or dtype.is_complex:
                values = values + torch.tensor([0.0, 2.0**-20], device=device).to(dtype)
                values = values * 1j if dtype.is_complex else values
                self.inner.register_parameter(f"parameter_{place}", nn.Parameter(values.clone()))
            self.register_buffer(f"buffer_{place}", values)


@contract("AMP-BF16-011")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", ["method", "to"])
def test_conversion_of_a_module(case: Case, target: Target, call: str, way: str) -> None:
    to = CALLS[call]
    case.require_arithmetic(target, to)
    # Module.to converts complex tensors as well; methods named for a type speak of floating-point ones.
    kinds = [dtype for dtype in KINDS if way == "method" or not dtype.is_complex]
    kinds = [dtype for dtype in kinds if dtype is not torch.complex64 or target.device_type == "cpu"]
    kinds = [dtype for dtype in kinds if dtype is not torch.float64 or target.computes_in(dtype)]
    module = _Holder(kinds, target.device)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    converted = getattr(module, call)() if way == "method" else module.to(to)
    case.equal("returns the module", converted is module, True)
    after: dict[str, Tensor] = module.state_dict()
    case.equal("names of parameters and buffers", list(after), list(before))
    for name, tensor in before.items():
        wanted = tensor.to(to) if tensor.is_floating_point() else tensor
        case.identical(f"{name}, {tensor.dtype} before", after[name], wanted)
