"""Normalizations whose input and whose incoming gradient have each memory layout, at each number of dimensions.

Kernels are chosen by the layout of the input, that of the incoming gradient, and whether the two agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .bounds_normalization import NORMALIZATIONS, images, running_images
from .op_error import Layout, Op
from .value_error import LAYOUTS as STRIDES


def _expanded(x: Tensor) -> Tensor:
    """One number for all of a channel of an image, as a mean over space gives; for all rows otherwise."""
    return (x.flatten(2)[..., 0].view(*x.shape[:2], *[1] * (x.dim() - 2)) if x.dim() > 2 else x[:1]).expand(x.shape)


LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": STRIDES["transposed"],
    "strided": STRIDES["every second"],
    "expanded": _expanded,
}
_OF_ROWS = (
    ("strided", "strided"),
    ("contiguous", "expanded"),
    ("transposed", "transposed"),
    ("transposed", "contiguous"),
    ("contiguous", "transposed"),
)
_OF_CHANNELS = (
    ("channels last", "channels last"),
    ("channels last", "contiguous"),
    ("contiguous", "expanded"),
    ("contiguous", "channels last"),
    ("channels last", "expanded"),
    ("strided", "strided"),
)
# More channels than a vector has numbers, and some that no whole vector takes.
SHAPES = {"images": (3, 40, 7, 7), "sequences": (3, 40, 49), "volumes": (3, 40, 3, 4, 4), "rows": (147, 40)}


_BY_CHANNEL = ("batch_norm", "batch_norm of running statistics", "instance_norm", "group_norm")
_BY_ROW = ("layer_norm", "rms_norm", "softmax", "log_softmax")


@dataclass(frozen=True)
class LaidOut:
    """A normalization whose input and incoming gradient have these layouts."""

    name: str
    of: str
    input: str
    gradient: str

    @property
    def id(self) -> str:
        return f"{self.name} of {self.of}-input {self.input}-gradient {self.gradient}".replace(" ", "_")

    @property
    def op(self) -> Op:
        """The normalization, on a tensor of its shape."""
        plain, shape, layout = NORMALIZATIONS[self.name], SHAPES[self.of], LAYOUTS[self.input]
        draw = running_images if len(plain.wide) > 2 else images
        return replace(
            plain,
            call=lambda x, *rest: plain.call(layout(x), *rest),
            draw=plain.draw if self.name in _BY_ROW else lambda kind, form, rng: draw(kind, form, rng, *shape),
            incoming=LAYOUTS[self.gradient],
            kinds=("same_sign",) if "softmax" not in self.name else ("flat",),
        )


def laid_out() -> Iterator[LaidOut]:
    for name in _BY_ROW:
        yield from (LaidOut(name, "rows", *pair) for pair in _OF_ROWS)
    for name, of in itertools.product(_BY_CHANNEL, SHAPES):
        if (name, of) != ("instance_norm", "rows"):  # it takes no rows
            yield from (LaidOut(name, of, *pair) for pair in (_OF_ROWS if of == "rows" else _OF_CHANNELS))
