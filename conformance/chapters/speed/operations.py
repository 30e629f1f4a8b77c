"""Timed operations: products, convolutions, attention and an LSTM, with their FLOP and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ...data import fixture, read_toml
from ...workloads.training import Region

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Work = Callable[[], object]

FP32, LOW = 4, 2  # bytes of an element in fp32 and in either AMP dtype
WORKSPACE = 108 << 20  # bytes that libraries may take, as measure/allocator.py has them


@dataclass(frozen=True)
class Operation:
    """One operation at one size, and what it costs.

    `operands` are the shapes of its fp32 operands, and `rows` says how often each weight is used (of a product of
    matrices, each element of the second), None where there are none. `results` counts the elements that it returns,
    `flops` its floating-point operations as defined, and `least_flops` those that no algorithm does without.
    `function` gets the operands; None for a recurrent layer, whose weights a library wants in one piece.
    """

    name: str
    operands: tuple[Shape, ...]
    results: int
    flops: float
    least_flops: float
    function: Callable[..., torch.Tensor] | None
    rows: int | None = None
    scratch: int = 0
    channels_last: bool = False
    size: str = ""

    @property
    def elements(self) -> int:
        """Elements of all operands: what a region casts."""
        return sum(map(_count, self.operands))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are enough for either arm."""
        return self.elements * (FP32 + LOW) + 2 * self.results * FP32 + self.scratch + WORKSPACE

    def arms(self, device: torch.device, region: Region) -> tuple[Work, Work]:
        """The operation in fp32, and inside `region`, casts included, on the same operands; both return its result."""
        work = self._built(device)

        def amp() -> object:
            with region():
                return work()

        return work, amp

    def _built(self, device: torch.device) -> Work:
        if self.function is None:
            (length, batch, width), *_ = self.operands
            layer = torch.nn.LSTM(width, width, device=device).requires_grad_(False)
            sequence = torch.randn(length, batch, width, device=device)
            return lambda: layer(sequence)[0]
        function, operands = self.function, self._operands(device)
        return lambda: function(*operands)

    def _operands(self, device: torch.device) -> list[torch.Tensor]:
        """Drawn from torch's global generator on the device: zeros would cost it less power, and so less time."""
        made = [torch.randn(shape, device=device) for shape in self.operands]
        return [each.to(memory_format=torch.channels_last) for each in made] if self.channels_last else made


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def product(n: int) -> Operation:
    """Return a product of two square matrices of that size."""
    flops = 2.0 * n**3
    return Operation("matmul", ((n, n), (n, n)), n * n, flops, flops, torch.matmul, rows=n)


def _matmul(at: Sizes) -> Operation:
    return product(at["size"])


def linear(rows: int, inputs: int, outputs: int) -> Operation:
    """Return a Linear on `rows` rows."""
    flops = 2.0 * rows * inputs * outputs
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    return Operation("linear", shapes, rows * outputs, flops, flops, F.linear, rows=rows)


def _bmm(at: Sizes) -> Operation:
    batch, n = at["batch"], at["size"]
    flops = 2.0 * batch * n**3
    shapes = ((batch, n, n), (batch, n, n))
    return Operation("bmm", shapes, batch * n * n, flops, flops, torch.bmm, rows=n)


def _padded(images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    return F.conv2d(images, kernels, padding=1)


def _conv(at: Sizes) -> Operation:
    images, channels, side = at["images"], at["channels"], at["side"]
    positions = images * side * side
    flops = 2.0 * positions * channels * channels * 9
    return Operation(
        "conv-first",
        ((images, channels, side, side), (channels, channels, 3, 3)),
        positions * channels,
        flops,
        # Winograd's F(m x m, 3 x 3) multiplies (m + 2)²/m² times an output and channel, more than once (Lavin and Gray
        # 2016, "Fast Algorithms for Convolutional Neural Networks").
        flops / 9,
        _padded,
        rows=positions,
        scratch=positions * channels * 9 * FP32,  # columns of the images, for a library that multiplies matrices
    )


def _conv_last(at: Sizes) -> Operation:
    return replace(_conv(at), name="conv-last", channels_last=True)


def _sdpa(at: Sizes) -> Operation:
    batch, heads, length, width = at["batch"], at["heads"], at["length"], at["width"]
    shape = (batch, heads, length, width)
    flops = 4.0 * batch * heads * length * length * width
    # A device without a fused kernel for fp32 holds the scores and their softmax.
    scores = 2 * batch * heads * length * length * FP32
    return Operation("sdpa", (shape,) * 3, _count(shape), flops, flops, F.scaled_dot_product_attention, scratch=scores)


def _lstm(at: Sizes) -> Operation:
    length, batch, width = at["length"], at["batch"], at["width"]
    flops = 2.0 * length * batch * 4 * width * 2 * width
    return Operation(
        "lstm",
        ((length, batch, width), (4 * width, width), (4 * width, width), (4 * width,), (4 * width,)),
        length * batch * width,
        flops,
        flops,
        None,
        rows=length * batch,
        scratch=8 * length * batch * width * FP32,  # the gates and states of every step
    )


_MAKERS: Mapping[str, tuple[str, Callable[[Sizes], Operation]]] = {
    "matmul": ("matmul", _matmul),
    "linear": ("linear", lambda at: linear(**at)),
    "bmm": ("bmm", _bmm),
    "conv-first": ("conv", _conv),
    "conv-last": ("conv", _conv_last),
    "sdpa": ("sdpa", _sdpa),
    "lstm": ("lstm", _lstm),
}

OPERATIONS = tuple(_MAKERS)
"""The names of the operations."""


def operation(name: str, size: str, device_type: str, shrink: int = 0) -> Operation:
    """Return the operation at the named size (fixtures/speed_sizes.toml); `shrink` halves its batch that many times.

    A square product has no batch: its size is halved. Raises KeyError for a name or size that there is not.
    """
    table, make = _MAKERS[name]
    return replace(make(shrunk(sizes(device_type, table, size), shrink)), size=size)


def sizes(device_type: str, name: str, size: str) -> dict[str, Any]:
    """Return the numbers of fixtures/speed_sizes.toml; every device but a CPU counts as an accelerator."""
    kind = "cpu" if device_type == "cpu" else "accelerator"
    found: dict[str, Any] = read_toml(fixture("speed_sizes.toml"))[kind][name][size]
    return found


def shrunk(at: dict[str, Any], times: int) -> dict[str, Any]:
    """The sizes with what multiplies the memory, the first of rows, batch, images or size, halved that many times."""
    batch = next(name for name in ("rows", "batch", "images", "size") if name in at)
    return {**at, batch: max(2, at[batch] >> times) if times else at[batch]}  # batch norm needs two
