"""Conversions and copies of single tensors: by each method, with each option, from each layout, there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...measure.storages import memory

CHANNELS_LAST = torch.channels_last


@dataclass(frozen=True)
class Conversion:
    """A conversion of a tensor to `dtype`: "low" is the amp dtype, "own" that of the tensor.

    `keeps` is what the result is where the tensor has the dtype already: "itself", "memory" for another tensor of the
    same elements, "copy"; None where the documentation leaves it to the layout.
    """

    call: Callable[[Tensor, torch.dtype], Tensor]
    dtype: str
    keeps: str | None
    channels_last: bool = False


def _inner(x: Tensor, low: torch.dtype, device: torch.device | None = None) -> Tensor:
    place = torch.zeros([size + 2 for size in x.shape], dtype=low, device=device or x.device)
    inside = (slice(1, -1),) * x.dim()
    place[inside] = x
    return place[inside]


def _turned(x: Tensor, low: torch.dtype, device: torch.device | None = None) -> Tensor:
    place = torch.zeros(tuple(reversed(x.shape)), dtype=low, device=device or x.device)
    place = place.permute(tuple(reversed(range(x.dim()))))
    return place.copy_(x)


def _spread(x: Tensor, low: torch.dtype) -> Tensor:
    """Return a copy into a tensor of one dimension more, whose members are all equal, as one of them."""
    return torch.zeros(2, *x.shape, dtype=low, device=x.device).copy_(x)[1]


def _method(name: str, dtype: str) -> dict[str, Conversion]:
    def plain(x: Tensor, low: torch.dtype) -> Tensor:
        made: Tensor = getattr(x, name)()
        return made

    def laid_out(x: Tensor, low: torch.dtype) -> Tensor:
        made: Tensor = getattr(x, name)(memory_format=CHANNELS_LAST)
        return made

    return {
        f"{name}()": Conversion(plain, dtype, "itself"),
        f"{name}(channels_last)": Conversion(laid_out, dtype, None, channels_last=True),
    }


CONVERSIONS: dict[str, Conversion] = {
    "to(dtype)": Conversion(lambda x, low: x.to(low), "low", "itself"),
    "to(dtype=dtype)": Conversion(lambda x, low: x.to(dtype=low), "low", "itself"),
    "to(float32)": Conversion(lambda x, low: x.to(torch.float32), "float32", "itself"),
    "to(other)": Conversion(lambda x, low: x.to(x.new_empty(0, dtype=low)), "low", "itself"),
    "to(device)": Conversion(lambda x, low: x.to(x.device), "own", "itself"),
    "to(device, dtype)": Conversion(lambda x, low: x.to(x.device, low), "low", "itself"),
    "to(non_blocking)": Conversion(lambda x, low: x.to(x.device, low, non_blocking=True), "low", "itself"),
    "to(copy)": Conversion(lambda x, low: x.to(low, copy=True), "low", "copy"),
    "to(dtype=, copy)": Conversion(lambda x, low: x.to(dtype=low, copy=True), "low", "copy"),
    "to(float32, copy)": Conversion(lambda x, low: x.to(torch.float32, copy=True), "float32", "copy"),
    "to(device, copy)": Conversion(lambda x, low: x.to(x.device, copy=True), "own", "copy"),
    "to(other, copy)": Conversion(lambda x, low: x.to(x.new_empty(0, dtype=low), copy=True), "low", "copy"),
    "to(dtype, channels_last)": Conversion(lambda x, low: x.to(low, memory_format=CHANNELS_LAST), "low", None, True),
    "to(channels_last)": Conversion(lambda x, low: x.to(memory_format=CHANNELS_LAST), "own", None, True),
    "to(device, dtype, channels_last)": Conversion(
        lambda x, low: x.to(x.device, low, memory_format=CHANNELS_LAST), "low", None, True
    ),
    "to(copy, channels_last)": Conversion(
        lambda x, low: x.to(low, copy=True, memory_format=CHANNELS_LAST), "low", "copy", True
    ),
    "type(dtype)": Conversion(lambda x, low: x.type(low), "low", "itself"),
    "type_as": Conversion(lambda x, low: x.type_as(x.new_empty(0, dtype=low)), "low", "itself"),
    **_method("float", "float32"),
    **_method("half", "float16"),
    **_method("bfloat16", "bfloat16"),
    "_to_copy": Conversion(lambda x, low: torch.ops.aten._to_copy(x, dtype=low), "low", "copy"),
    "clone": Conversion(lambda x, low: x.clone(), "own", "copy"),
    "clone(channels_last)": Conversion(lambda x, low: x.clone(memory_format=CHANNELS_LAST), "own", "copy", True),
    "contiguous(channels_last)": Conversion(
        lambda x, low: x.contiguous(memory_format=CHANNELS_LAST), "own", None, True
    ),
    "contiguous": Conversion(lambda x, low: x.contiguous(), "own", None),
    "detach": Conversion(lambda x, low: x.detach(), "own", "memory"),
    "asarray": Conversion(lambda x, low: torch.asarray(x, dtype=low), "low", None),
    "asarray(copy)": Conversion(lambda x, low: torch.asarray(x, dtype=low, copy=True), "low", "copy"),
    "as_tensor": Conversion(lambda x, low: torch.as_tensor(x, dtype=low), "low", "itself"),
    "copy_": Conversion(lambda x, low: torch.empty_like(x, dtype=low).copy_(x), "low", "copy"),
    "copy_(non_blocking)": Conversion(
        lambda x, low: torch.empty_like(x, dtype=low).copy_(x, non_blocking=True), "low", "copy"
    ),
    "copy_ into a float32 tensor": Conversion(lambda x, low: torch.empty_like(x).float().copy_(x), "float32", "copy"),
    "copy_(non_blocking) into a float32 tensor": Conversion(
        lambda x, low: torch.empty_like(x).float().copy_(x, non_blocking=True), "float32", "copy"
    ),
    "into a part": Conversion(_inner, "low", "copy"),
    "into a turned tensor": Conversion(_turned, "low", "copy"),
    "into a turned float32 tensor": Conversion(lambda x, low: _turned(x, torch.float32), "float32", "copy"),
    "into a larger tensor": Conversion(_spread, "low", "copy"),
}
Trip = Callable[[Tensor, torch.dtype, torch.device], Tensor]
# From a tensor on the host to the device, or by it to the host, to the dtype.
TRIPS: dict[str, tuple[Trip, str]] = {
    "to(device)": (lambda x, low, device: x.to(device), "own"),
    "to(device, dtype)": (lambda x, low, device: x.to(device, low), "low"),
    "to(device, dtype, non_blocking)": (lambda x, low, device: x.to(device, low, non_blocking=True), "low"),
    "to(device, non_blocking)": (lambda x, low, device: x.to(device, non_blocking=True), "own"),
    "to(other)": (lambda x, low, device: x.to(torch.empty(0, dtype=low, device=device)), "low"),
    "copy_": (lambda x, low, device: torch.empty(x.shape, dtype=low, device=device).copy_(x), "low"),
    "copy_ of its dtype": (lambda x, low, device: torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x), "own"),
    "copy_(non_blocking)": (
        lambda x, low, device: torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x, non_blocking=True),
        "own",
    ),
    "copy_(dtype, non_blocking)": (
        lambda x, low, device: torch.empty(x.shape, dtype=low, device=device).copy_(x, non_blocking=True),
        "low",
    ),
    "into a part": (lambda x, low, device: _inner(x, low, device), "low"),
    "into a turned tensor": (lambda x, low, device: _turned(x, low, device), "low"),
    "tensor(list)": (lambda x, low, device: torch.tensor(x.tolist(), dtype=low, device=device), "low"),
    "cpu()": (lambda x, low, device: _laid_out_as(x, device).cpu(), "own"),
    "to(cpu, dtype)": (lambda x, low, device: _laid_out_as(x, device).to("cpu", low), "low"),
    "copy_ to the host": (lambda x, low, device: torch.empty(x.shape, dtype=low).copy_(_laid_out_as(x, device)), "low"),
    "part of the host": (lambda x, low, device: _inner(_laid_out_as(x, device), low, torch.device("cpu")), "low"),
}


def _laid_out_as(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device with the strides of a tensor on the host, which may overlap."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((size,), (1,)).to(device).as_strided(x.shape, x.stride())


def _wider(x: Tensor) -> Tensor:
    whole = x.new_zeros([size + 3 for size in x.shape])
    return whole[tuple(slice(1, -2) for _ in x.shape)].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=CHANNELS_LAST),
    "turned": lambda x: x.mT.contiguous().mT,
    "of steps": lambda x: torch.stack([x, x], -1)[..., 0],
    "part of a larger one": _wider,
    "expanded": lambda x: x[:1].expand_as(x),
    "matrix": lambda x: x.flatten(1),
    "turned matrix": lambda x: x.flatten(1).t().contiguous().t(),
    "square matrix": lambda x: torch.cat([x.flatten(), x.flatten()[:1]]).view(7, 7),
    "turned square matrix": lambda x: torch.cat([x.flatten(), x.flatten()[:1]]).view(7, 7).t(),
    "one number": lambda x: x[0, 0, 0, 1],
}


def numbers() -> Tensor:
    """Return float32 numbers (2, 3, 2, 4): ties of both types, subnormals, beyond fp16's range, with signs."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8 + 2**-20, 0.1, 1 / 3, 2**-9 - 2**-20]
    small = [2**-24, 2**-25, 3 * 2**-25, 2**-126, 2**-133, 2**-134, 3 * 2**-134, 1e-7]
    large = [65504.0, 65519.0, 65520.0, 70000.0, 1e30, 3.3e38, 257.0, 259.0]
    sizes = torch.tensor([*ties, *small, *large])
    return torch.stack([sizes, -sizes]).reshape(2, 3, 2, 4)


def differences(
    host: Tensor,
    device: torch.device,
    low: torch.dtype,
    nearest: Callable[[Tensor, torch.dtype], Tensor],
    takes: Callable[[torch.dtype], bool],
) -> Iterator[tuple[str, str | None, Any]]:
    """Yield by conversion of a tensor on the host, and its like on the device, what is wrong (None: nothing).

    Third comes what a region must not change: type, shape, strides, and what the result shares with the tensor.
    `nearest` rounds a float32 or 16-bit tensor to a dtype; `takes` tells the dtypes that the device has.
    """
    for name, conversion in CONVERSIONS.items():
        x = _laid_out_as(host, device)
        dtype = _dtype(conversion.dtype, x, low)
        if not takes(dtype) or (conversion.channels_last and x.dim() != 4):
            continue
        made = conversion.call(x, low)
        wrong = _wrong(made, nearest(host, dtype), x.device)
        shared = "itself" if made is x else "memory" if memory(made) == memory(x) else "copy"
        if conversion.keeps is not None:
            wanted = conversion.keeps if dtype == x.dtype or conversion.keeps == "memory" else "copy"
            wrong = wrong or (None if shared == wanted else f"is {shared}, promised {wanted}")
        if conversion.channels_last and not made.is_contiguous(memory_format=CHANNELS_LAST):
            wrong = wrong or f"has strides {made.stride()}"
        yield name, wrong, (made.dtype, tuple(made.shape), made.stride(), shared, made.requires_grad)
    for name, (trip, kind) in TRIPS.items():
        made = trip(host, low, device)
        there = torch.device("cpu") if "host" in name or "cpu" in name else device
        yield f"{name}, of a trip", _wrong(made, nearest(host, _dtype(kind, host, low)), there), made.stride()


def _dtype(kind: str, x: Tensor, low: torch.dtype) -> torch.dtype:
    named: torch.dtype = low if kind == "low" else x.dtype if kind == "own" else getattr(torch, kind)
    return named


def _wrong(made: Tensor, wanted: Tensor, device: torch.device) -> str | None:
    if (made.dtype, made.shape, made.device.type) != (wanted.dtype, wanted.shape, device.type):
        return f"is {made.dtype} {tuple(made.shape)} on {made.device}"
    seen = made.detach().cpu().contiguous()
    return None if torch.equal(_signed(seen), _signed(wanted)) else "has other values"


def _signed(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)
