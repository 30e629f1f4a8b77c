"""Normalizations of long rows far from zero, and the errors of their gradients that fp32 sums leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...oracles.numbers.formats import FP32, Format
from .op_error import half_spacing

# Of an input in the layout of an op, weights and biases.
Call: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
# From a matrix of rows to the input of an op; the result has that shape, and its gradient that layout in memory.
Layout: TypeAlias = Callable[[Tensor], Tensor]
ROWS = 8
DEVIATIONS = 4.0  # how far the mean of a row and that of its incoming gradient are from zero
EPS = 1e-5


def far_from_zero(length: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Draw rows whose deviation is 1 and whose mean is `DEVIATIONS`."""
    return (torch.randn(ROWS, length, generator=rng) + DEVIATIONS).to(dtype)


def drawn_length(rng: torch.Generator) -> int:
    """Draw a number of whole blocks of 64 elements, up to 5,056."""
    return 64 * int(torch.randint(8, 80, (), generator=rng))


def as_rows(x: Tensor) -> Tensor:
    """Return rows as they are."""
    return x


def as_columns(x: Tensor) -> Tensor:
    """Return the rows as columns of a contiguous matrix."""
    return x.t().contiguous()


def _images(number: int, memory_format: torch.memory_format) -> Layout:
    """Lay rows out as channels of so many images, of one pixel in width."""

    def layout(x: Tensor) -> Tensor:
        images = x.view(len(x), number, -1).transpose(0, 1).unsqueeze(-1)
        return images.contiguous(memory_format=memory_format)

    return layout


@dataclass(frozen=True)
class Normalization:
    """A normalization of each row of a matrix; its weight and bias have one number for a row, or one for an element."""

    call: Call
    layout: Layout
    by_row: bool = True

    def parameters(self, rows: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw an fp32 weight, around one, and a bias."""
        number = rows if self.by_row else length
        return torch.rand(number, generator=rng) + 0.5, torch.randn(number, generator=rng)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
# One channels-last image with the stride of a view has wrong gradients of batch_norm (AMP-NUMERICS-083): here are two.
NORMALIZATIONS: Mapping[str, Normalization] = {
    "layer_norm": Normalization(lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b, EPS), as_rows, False),
    "rms_norm": Normalization(lambda x, w, b: F.rms_norm(x, x.shape[1:], w, EPS), as_rows, False),
    "group_norm": Normalization(lambda x, w, b: F.group_norm(x, x.shape[1], w, b, EPS), _images(1, CONTIGUOUS)),
    "group_norm of two rows": Normalization(
        lambda x, w, b: F.group_norm(x, x.shape[1] // 2, w, b, EPS), _images(1, CONTIGUOUS)
    ),
    "group_norm of channels last": Normalization(
        lambda x, w, b: F.group_norm(x, x.shape[1] // 2, w, b, EPS), _images(1, CHANNELS_LAST)
    ),
    "instance_norm": Normalization(lambda x, w, b: F.instance_norm(x, None, None, w, b), _images(1, CONTIGUOUS)),
    "batch_norm": Normalization(_batch_norm, as_columns),
    "batch_norm of images": Normalization(_batch_norm, _images(2, CONTIGUOUS)),
    "batch_norm of channels last": Normalization(_batch_norm, _images(2, CHANNELS_LAST)),
}
SOFTMAXES: Mapping[str, tuple[Callable[[Tensor], Tensor], Layout]] = {
    "softmax": (lambda x: x.softmax(1), as_rows),
    "softmax of columns": (lambda x: x.softmax(0), as_columns),
    "log_softmax": (lambda x: x.log_softmax(1), as_rows),
    "log_softmax of columns": (lambda x: x.log_softmax(0), as_columns),
}


def allowed_of_input(exact: Tensor, size: Tensor, length: int, form: Format) -> Tensor:
    """Return the error that fp32 sums of `length` terms and a rounding of each term and of the result leave.

    `size` has the magnitudes of what is added and subtracted for each element of the gradient. The sums lose in any
    order `length` roundings of their magnitudes, times as much where the mean is not zero (Higham 2002, section 4.2).
    """
    lost = length * (DEVIATIONS + 1) * FP32.unit_roundoff * size
    return half_spacing(exact.abs(), form) + half_spacing(size, form) + lost


def size_of_normalization(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Return w/s (|g| + mean |g| + |x'| mean |g x'|), the magnitudes of the terms of the gradient of each element.

    All of shape (rows, length) or to be broadcast to it, in float64; x' is the normalized row, s its deviation.
    """
    deviation = x.std(1, keepdim=True)
    normalized = ((x - x.mean(1, keepdim=True)) / deviation).abs()
    terms = (gradient * weight).abs()
    of_sums = terms.mean(1, keepdim=True) + normalized * (terms * normalized).mean(1, keepdim=True)
    return (terms + of_sums) / deviation


def size_of_softmax(result: Tensor, gradient: Tensor, logarithm: bool) -> Tensor:
    """Return the magnitudes of the gradient's terms: p (|g| + sum p |g|) of softmax, |g| + p sum |g| of log_softmax."""
    gradient = gradient.abs()
    if logarithm:
        return gradient + result.exp() * gradient.sum(1, keepdim=True)
    return result * (gradient + (result * gradient).sum(1, keepdim=True))


def kept_logarithms(x: Tensor, gradient: Tensor, form: Format) -> Tensor:
    """Return what is lost where log_softmax saves its result in a type: p sum |g| times the error of a logarithm of p.

    The CPU rounds the logarithm of a row's sum to that type before it subtracts it (aten/src/ATen/native/cpu,
    SoftMaxKernel.cpp).
    """
    total = x.logsumexp(1, keepdim=True)
    error = half_spacing(total.abs(), form) + half_spacing((x - total).abs(), form)
    return (x - total).exp() * gradient.abs().sum(1, keepdim=True) * error


def allowed_of_parameter(terms: Tensor, length: int, form: Format) -> Tensor:
    """Return the error of the sum of each row of `terms` in fp32, in any order, with each term rounded to `form`.

    CUDA's backward of batch_norm rounds each product (aten/src/ATen/native/cuda/Normalization.cuh).
    """
    lost = (length + 8) * (DEVIATIONS + 1) * FP32.unit_roundoff
    return (form.unit_roundoff + lost) * terms.abs().sum(1)
