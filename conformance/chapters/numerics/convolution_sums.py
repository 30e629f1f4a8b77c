"""Sums that convolutions and their gradients form, of fp16 products beyond the range of fp16.

The products are 32 of 90000 or more, half of them negative, and one of 21. They are added up over the channels, the
taps, the samples or the places of an image; a kernel goes through columns in the type of the tensor where it forms no
such sum in one product.

The other sums are of a large number and many that a 16-bit sum loses beside it, over the samples of a batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

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


def op_name(dimensions: int, transposed: bool) -> str:
    """Return the name of a convolution in torch.nn.functional."""
    return f"conv{'_transpose' if transposed else ''}{dimensions}d"


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
        return f"{op_name(self.dimensions, self.transposed)}-{self.of}-over-{self.place}"

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
        op = getattr(F, op_name(self.dimensions, self.transposed))
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


SAMPLES = 129


@dataclass(frozen=True)
class BatchSum:
    """A convolution whose weight and bias gradients are sums over samples of few places each.

    The gradient that comes in is 1 / u for the first sample and 1 for the others, and the image is of numbers of 1/2
    and 1: a sum in the 16-bit type, sample by sample, keeps none of the others.
    """

    dimensions: int
    transposed: bool
    groups: int = 1
    channels: tuple[int, int] = (4, 4)
    side: int = 2
    options: tuple[tuple[str, int], ...] = ()
    last: bool = False

    def gradients(
        self, dtype: torch.dtype, device: torch.device, rng: torch.Generator, region: AbstractContextManager[object]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients of weight and bias for operands of a type in `region`, each with that in float64."""
        of_image, of_result = self.channels
        options = dict(self.options)
        stride, dilation = options.get("stride", 1), options.get("dilation", 1)
        # Two results in each dimension with a stride, else one: gradients of biases are numbers of fp16.
        places = stride if self.transposed else 1 + stride * (stride - 1) + dilation * (self.side - 1)
        image = (1 + torch.randint(0, 2, (SAMPLES, of_image, *(places,) * self.dimensions), generator=rng)) / 2
        image[0] = 1.0
        pair = (of_image, of_result // self.groups) if self.transposed else (of_result, of_image // self.groups)
        weight, bias = torch.ones(*pair, *(self.side,) * self.dimensions), torch.zeros(of_result)
        op = getattr(F, op_name(self.dimensions, self.transposed))

        def found(given: torch.dtype, place: torch.device, region: AbstractContextManager[object]) -> list[Tensor]:
            operands = [self._laid(part).to(place, given) for part in (image, weight)]
            leaves = [part.requires_grad_() for part in (*operands, bias.to(place, given, copy=True))]
            with region:
                result = op(*leaves, groups=self.groups, **options)
            incoming = torch.ones(result.shape)
            incoming[0] = 2 / torch.finfo(dtype).eps
            result.backward(self._laid(incoming).to(place, result.dtype))
            return [leaf.grad for leaf in leaves[1:] if leaf.grad is not None]

        exact = found(torch.float64, torch.device("cpu"), contextlib.nullcontext())
        seen = found(dtype, device, region)
        return {what: (one, other) for what, one, other in zip(("weight", "bias"), seen, exact, strict=True)}

    def _laid(self, tensor: Tensor) -> Tensor:
        """Return a copy in the layout of the convolution."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim()) if self.last else None
        return tensor.clone(memory_format=last or torch.contiguous_format)


def _batch_sums(dimensions: int, transposed: bool) -> dict[str, BatchSum]:
    """Return the kinds of convolution of some dimensions, each of which a library may compute in a way of its own."""
    one = partial(BatchSum, dimensions, transposed)
    found = {
        "plain": one(),
        "of one place": one(side=1),
        "of groups": one(groups=2),
        "of groups of one place": one(groups=2, side=1),
        "depthwise": one(groups=4),
        "depthwise of one place": one(groups=4, side=1),
        "depthwise with a multiplier": one(groups=4, channels=(4, 8)),
        "strided": one(side=2 - transposed, options=(("stride", 2),)),
        "strided of groups": one(groups=2, side=2 - transposed, options=(("stride", 2),)),
        "dilated": one(options=(("dilation", 2),)),
        "dilated of groups": one(groups=2, options=(("dilation", 2),)),
    }
    if dimensions > 1:
        found["channels last"] = one(last=True)
        found["depthwise, channels last"] = one(groups=4, last=True)
    return found


BATCH_SUMS: dict[str, dict[str, BatchSum]] = {
    f"conv{'_transpose' if transposed else ''}{dimensions}d": _batch_sums(dimensions, transposed)
    for dimensions in (1, 2, 3)
    for transposed in (False, True)
}
QUICK_BATCH_SUMS = ("plain", "of groups", "depthwise", "dilated of groups", "depthwise, channels last")
"""Kinds of the depth `quick`."""
