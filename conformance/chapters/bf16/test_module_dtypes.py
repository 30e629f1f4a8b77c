"""Check what a conversion to another floating-point type converts of a module and of a packed sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, unpack_sequence

from ...harness.check import Case, contract
from ...harness.targets import Target

CALLS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
KINDS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool),
)


class _Holder(nn.Module):
    """A parameter of each floating-point and complex type, and buffers of every type, in two levels and containers."""

    def __init__(self, kinds: list[torch.dtype], device: torch.device) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.listed, self.named = nn.ParameterList(), nn.ParameterDict()
        for place, dtype in enumerate(kinds):
            # 257 and 1 + 2^-20 are numbers that a 16-bit type has not.
            values = torch.tensor([257, 1], device=device).to(dtype)
            if dtype.is_floating_point or dtype.is_complex:
                values = values + torch.tensor([0.0, 2.0**-20], device=device).to(dtype)
                values = values * 1j if dtype.is_complex else values
                self.inner.register_parameter(f"parameter_{place}", nn.Parameter(values.clone()))
                self.listed.append(nn.Parameter(values.clone(), requires_grad=False))
                self.named[f"parameter_{place}"] = nn.Parameter(values.sum())
            self.register_buffer(f"buffer_{place}", values)
            self.inner.register_buffer(f"unsaved_{place}", values.clone(), persistent=False)
            self.inner.register_buffer(f"tied_{place}", values)
            self.inner.register_buffer(f"one_{place}", values[0].clone())
            self.inner.register_buffer(f"empty_{place}", values[:0].clone())
        self.register_buffer("nothing", None)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, the unsaved and the tied ones too."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers(remove_duplicate=False))}


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
    before = {name: tensor.detach().clone() for name, tensor in module.tensors().items()}
    trained = [name for name, one in module.tensors().items() if one.requires_grad]
    converted = getattr(module, call)() if way == "method" else module.to(to)
    case.equal("returns the module", converted is module, True)
    after = module.tensors()
    case.equal("names of parameters and buffers", list(after), list(before))
    for name, tensor in before.items():
        wanted = tensor.to(to) if tensor.is_floating_point() else tensor
        case.identical(f"{name}, {tensor.dtype} before", after[name].detach(), wanted)
    case.equal("trained parameters", [name for name, one in after.items() if one.requires_grad], trained)


LENGTHS = (2, 4, 1, 3, 4)


@contract("AMP-BF16-012")
@pytest.mark.parametrize(
    ("call", "way"), [*((call, "to") for call in CALLS), *((call, "method") for call in ("half", "float"))]
)
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
def test_conversion_of_a_packed_sequence(
    case: Case, target: Target, rng: torch.Generator, order: str, call: str, way: str
) -> None:
    to = CALLS[call]
    case.require_arithmetic(target, to)
    lengths = sorted(LENGTHS, reverse=True) if order == "sorted" else list(LENGTHS)
    given = [torch.randn(length, 3, generator=rng).to(target.device) for length in lengths]
    packed = pack_sequence(given, enforce_sorted=order == "sorted")
    converted = getattr(packed, call)() if way == "method" else packed.to(to)
    case.equal("type of the elements", converted.data.dtype, to)
    case.equal("type of a packed sequence", type(converted) is type(packed), True)
    rounded = [one.to(to) for one in given]
    for number, (seen, one) in enumerate(zip(unpack_sequence(converted), rounded, strict=True)):
        case.identical(f"unpacked sequence {number}", seen, one)
    for first in (False, True):
        what = "the batch first" if first else "time first"
        padded, kept = pad_packed_sequence(converted, batch_first=first)
        case.equal(f"{what}: lengths", kept.tolist(), lengths)
        for number, one in enumerate(rounded):
            seen = padded[number] if first else padded[:, number]
            case.identical(f"{what}: sequence {number}", seen[: len(one)], one)
