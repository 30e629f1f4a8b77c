"""Draw products and convolutions of whole numbers, of sizes around those of vectors, blocks and tiles of kernels.

The numbers are -1, 0 and 1, as few of them other than zero as keep every sum within 256: what bfloat16 holds exactly,
and what neither the order of sums nor the type that they are formed in changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .convolution_sums import op_name
from .drawn_ops import Draws

MOST = 256
_TERMS = 64  # other than zero, of one sum: its deviation is at most 8
_LENGTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 97, 128)
_CHANNELS = (1, 2, 3, 4, 5, 8, 8, 12, 16, 16, 24, 32, 40, 48, 64)
_TAPS = (1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 11, 12, 16)
_WORK = 500_000  # products of one call
# Of so many numbers are the blocks in which the units for products of 16-bit numbers take the terms of a sum.
BLOCK = 32


@dataclass(frozen=True)
class Sized:
    """A call of whole numbers: `call(left, right, *more)`, where `more` is a bias or what is added to the product."""

    name: str
    call: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    incoming: Tensor
    terms: tuple[int, ...]  # of the sums of the result and of gradients, in the direction in which kernels go on
    options: dict[str, Any] = field(default_factory=dict)
    one_place: bool = False  # of the result in its last dimension, or of the image of a transposed convolution
    gaps: bool = False  # places of the image that no window reads, or of the result that nothing is written to
    covered: bool = False  # an image that a window covers, from its padding on
    transformed: bool = False  # a library may compute it by a transform, which is not exact

    def described(self) -> str:
        """Return the sizes and options, as one would write them."""
        sizes = ", ".join(str(tuple(one.shape)) for one in self.operands)
        return ", ".join([sizes, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def kind(self) -> str:
        """Return the name and, of sizes that some kernels treat apart, which."""
        if self.one_place:
            return f"{self.name} of one place"
        if self.covered:
            return f"{self.name} with images that a window covers"
        if self.gaps:
            return f"{self.name} with places that no window reads"
        in_blocks = any(terms % BLOCK == 0 for terms in self.terms)
        return f"{self.name} of whole blocks of terms" if in_blocks else self.name


def _whole(draws: Draws, shape: tuple[int, ...], terms: int) -> Tensor:
    """Return -1, 0 and 1, of which about `_TERMS` in `terms` are not 0."""
    share = min(0.75, _TERMS / terms)
    signs = torch.randint(0, 2, shape, generator=draws.generator) * 2 - 1
    return (signs * (torch.rand(shape, generator=draws.generator) < share)).float()


def _few(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """Return zeros with up to 64 ones, the first and last element among them."""
    flat = torch.zeros(math.prod(shape))
    flat[torch.randint(0, len(flat), (62,), generator=draws.generator)] = 1
    flat[0] = flat[-1] = 1
    return flat.view(shape)


def _laid(draws: Draws, tensor: Tensor) -> Tensor:
    """Return the matrix or image, as it is, transposed or channels-last."""
    if draws.yes():
        return tensor
    if tensor.dim() < 4:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def _linear(left: Tensor, right: Tensor, *bias: Tensor) -> Tensor:
    return F.linear(left, right.transpose(-1, -2), *bias)


# By name: the call, whether it takes several matrices, and the shape of what is added by the sizes of the product.
_Product = tuple[Callable[..., Tensor], bool, Callable[[int, int, int], tuple[int, ...]] | None]
PRODUCTS: dict[str, _Product] = {
    "mm": (lambda x, y: torch.mm(x, y), False, None),
    "matmul": (lambda x, y: torch.matmul(x, y), True, None),
    "bmm": (lambda x, y: torch.bmm(x, y), True, None),
    "linear": (_linear, False, None),
    "linear of a bias": (_linear, False, lambda _, __, n: (n,)),
    "addmm": (lambda x, y, z: torch.addmm(z, x, y), False, lambda _, m, n: (m, n)),
    "baddbmm": (lambda x, y, z: torch.baddbmm(z, x, y), True, lambda b, m, n: (b, m, n)),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), True, None),
}


def product(draws: Draws) -> Sized:
    """Draw a product of matrices, or of several."""
    name = draws.one(list(PRODUCTS))
    call, several, added = PRODUCTS[name]
    rows, terms, columns = (draws.one(_LENGTHS) for _ in range(3))
    batch = draws.number(1, 5) if several else 1
    lead = (batch,) if several else ()
    left = _laid(draws, _whole(draws, (*lead, rows, terms), terms))
    right = _laid(draws, _whole(draws, (*lead, terms, columns), 1))
    more = () if added is None else (_whole(draws, added(batch, rows, columns), 1),)
    incoming = _few(draws, (*lead, rows, columns))
    return Sized(name, call, (left, right, *more), incoming, (terms, rows, columns))


def convolution(dimensions: int, transposed: bool, draws: Draws) -> Sized:
    """Draw a convolution of one to three dimensions."""
    name = op_name(dimensions, transposed)
    groups = 1 if draws.number(0, 3) else 2
    channels, outputs = (draws.one(_CHANNELS) for _ in range(2))
    taps = [draws.one(_TAPS)]
    while len(taps) < dimensions:
        taps.insert(0, taps[-1] if draws.yes() and math.prod(taps) < 9 else draws.number(1, 3))
    stride = draws.one((1, 1, 2, 3, taps[-1], taps[-1] + 1))
    strides = (*[min(stride, 2)] * (dimensions - 1), stride)
    dilation = draws.one((1, 1, 1, 2))
    padding = draws.one((0, 0, 1, taps[-1] // 2))
    padding = 0 if transposed else min(padding, *(size // 2 for size in taps))
    windows = [dilation * (size - 1) + 1 for size in taps]
    extents = [1 if transposed else window - 2 * padding for window in windows]
    more = draws.one((0, 1, stride, 12, 40))
    lasts = [*(draws.number(0, 3) for _ in extents[1:]), more]
    space = tuple(max(1, extent + last) for extent, last in zip(extents, lasts, strict=True))
    samples = draws.number(1, 3)
    width = channels * math.prod(taps)
    # As many output channels as keep the work small.
    while outputs > 1 and samples * outputs * width * math.prod(space) > _WORK:
        outputs //= 2
    image = (samples, channels * groups, *space)
    weight = (channels * groups, outputs, *taps) if transposed else (outputs * groups, channels, *taps)
    options: dict[str, Any] = {"stride": strides, "padding": padding, "dilation": dilation, "groups": groups}
    call = partial(getattr(F, name), **options)
    bias = _whole(draws, (outputs * groups,), 1)
    operands = (_laid(draws, _whole(draws, image, 1)), _laid(draws, _whole(draws, weight, width)), bias)
    incoming = _few(draws, tuple(call(*(operand.to("meta") for operand in operands)).shape))
    across = taps[-1]
    return Sized(
        name,
        call,
        operands,
        incoming,
        (channels * across, outputs * across),
        options,
        gaps=any(
            step > window or (not transposed and (size + 2 * padding - window) % step)
            for size, window, step in zip(space, windows, strides, strict=True)
        ),
        covered=padding > 0 and any(size + padding <= window for size, window in zip(space, windows, strict=True)),
        one_place=(image if transposed else incoming.shape)[-1] == 1,
        transformed=dimensions > 1 and max(strides) == dilation == 1 and max(taps) > 2,
    )


SIZED: dict[str, Callable[[Draws], Sized]] = {
    "products": product,
    **{
        op_name(dimensions, transposed): partial(convolution, dimensions, transposed)
        for transposed in (False, True)
        for dimensions in (1, 2, 3)
    },
}
