"""Sums that convolutions and their gradients form, of fp16 products beyond the range of fp16.

The products are 32 of 90000 or more, half of them negative, and one of 21. They are added up over the channels, the
taps, the samples or the places of an image; a kernel goes through columns in the type of the tensor where it forms no
such sum in one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

TERMS = 33

# Half of the first factors are 300 and half -300, and one is 7; a larger one of either sign makes the sum infinite.
SUMS: dict[str, tuple[float, float, float]] = {
    "a number of the type": (300.0, -300.0, 21.0),
    "beyond the largest number": (400.0, -300.0, math.inf),
    "below the lowest number": (300.0, -400.0, -math.inf),
}


def factors(first: float, second: float) -> tuple[Tensor, Tensor]:
    """Return both factors of each product."""
    left = torch.tensor([first] * (TERMS // 2) + [second] * (TERMS // 2) + [7.0])
    return left, torch.tensor([300.0] * (TERMS - 1) + [3.0])


@dataclass(frozen=True)
class ConvolutionSum:
    """One way in which a convolution, or one of its gradients, adds up products.

    `place` is what is added up over: channels, taps, samples or places. `of` names what the sum is an element of.
    """

    dimensions: int
    transposed: bool
    of: str
    place: str

    @property
    def id(self) -> str:
        op = f"conv_transpose{self.dimensions}d" if self.transposed else f"conv{self.dimensions}d"
        return f"{op}-{self.of}-over-{self.place}"

    @property
    def layouts(self) -> tuple[torch.memory_format, ...]:
        last = {2: (torch.channels_last,), 3: (torch.channels_last_3d,)}
        return (torch.contiguous_format, *last.get(self.dimensions, ()))

    def _line(self, numbers: Tensor) -> Tensor:
        """Return one sample of one channel whose last dimension has the numbers."""
        return numbers.reshape(1, 1, *(1,) * (self.dimensions - 1), -1)

    def _samples(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(-1, 1, *(1,) * self.dimensions)

    def _channels(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(1, -1, *(1,) * self.dimensions)

    def _operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return image, weight and, for a gradient, what comes in."""
        one = self._line(torch.ones(1))
        if self.of == "result":
            if self.place == "channels":
                return self._channels(left), (self._samples if self.transposed else self._channels)(right), None
            # A transposed convolution has the tap of the other end for each place of the image.
            return self._line(left), self._line(right.flip(0) if self.transposed else right), None
        if self.of == "image":
            if self.place == "channels":
                return one, (self._channels if self.transposed else self._samples)(right), self._channels(left)
            if self.transposed:
                return one, self._line(right), self._line(left)
            return self._line(torch.ones(2 * TERMS - 1)), self._line(right.flip(0)), self._line(left)
        spread = self._samples if self.place == "samples" else self._line
        return spread(left), one, spread(right)

    def seen(
        self,
        first: float,
        second: float,
        layout: torch.memory_format,
        device: torch.device,
        region: AbstractContextManager[object],
    ) -> Tensor:
        """Return the elements that are sums of all products, from a call in `region`."""
        image, weight, incoming = self._operands(*factors(first, second))
        leaves = [
            part.contiguous(memory_format=layout).to(device, copy=True).requires_grad_() for part in (image, weight)
        ]
        op = getattr(F, f"conv_transpose{self.dimensions}d" if self.transposed else f"conv{self.dimensions}d")
        with region:
            found: Tensor = op(*leaves)
        if incoming is not None:
            found.backward(incoming.contiguous(memory_format=layout).to(device, found.dtype))
            gradient = leaves[0 if self.of == "image" else 1].grad
            assert gradient is not None
            found = gradient
        # The middle of a line longer than one is where every tap meets a place.
        return found.detach()[..., found.shape[-1] // 2]


def _convolution_sums() -> Iterator[ConvolutionSum]:
    """Yield every way to add up, for convolutions of one to three dimensions and their transposes."""
    for dimensions in (1, 2, 3):
        for transposed in (False, True):
            for of, places in (
                ("result", ("channels", "taps")),
                ("image", ("channels", "taps")),
                ("weight", ("samples", "places")),
            ):
                for place in places:
                    yield ConvolutionSum(dimensions, transposed, of, place)


CONVOLUTION_SUMS = {one.id: one for one in _convolution_sums()}
