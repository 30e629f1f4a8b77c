"""Faults of one option, one layout or one gradient of an op, which only the samples of an operator database have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def _pair(numbers: Sequence[int]) -> list[int]:
    return list(numbers) * 2 if len(numbers) == 1 else list(numbers)


@fault("AMP-NUMERICS-119", level="standard")
def averages_of_16_bit_windows_count_the_padding() -> Iterator[None]:
    """avg_pool2d of 16-bit tensors counts the padding where it was asked not to."""

    def avg_pool2d(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        steps, edges = _pair(stride or size), _pair(padding)
        counted = count_include_pad or x.dtype in _LOW
        wide = x.float() if x.dtype in _LOW else x  # the CPU has no avg_pool3d of 16-bit tensors
        found: Tensor = _aten.avg_pool3d(
            wide.unsqueeze(-3), [1, *_pair(size)], [1, *steps], [0, *edges], ceil_mode, counted, divisor_override
        )
        return found.squeeze(-3).to(x.dtype)

    with kernel("avg_pool2d", avg_pool2d, "CPU"):
        yield


@fault("AMP-NUMERICS-119", level="standard")
def last_windows_of_16_bit_maxima_repeat_the_first() -> Iterator[None]:
    """max_pool2d of 16-bit channels-last tensors with ceil_mode gives the last window what the first has."""

    def max_pool2d(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:
        steps = _pair(stride or size)
        values, places = _aten.max_pool3d_with_indices(
            x.unsqueeze(-3), [1, *_pair(size)], [1, *steps], [0, *_pair(padding)], [1, *_pair(dilation)], ceil_mode
        )
        values = values.squeeze(-3)
        if x.dtype in _LOW and not x.is_contiguous() and ceil_mode:
            values[..., -1] = values[..., 0]
        return values, places.squeeze(-3)

    with kernel("max_pool2d_with_indices", max_pool2d, "CPU"):
        yield


@fault("AMP-NUMERICS-119", level="standard")
def corners_of_16_bit_images_are_not_aligned() -> Iterator[None]:
    """Bilinear interpolation of 16-bit images ignores align_corners."""

    def bilinear(
        x: Tensor, size: Sequence[int], corners: bool, high: float | None = None, wide: float | None = None
    ) -> Tensor:
        aligned = corners and x.dtype not in _LOW
        found: Tensor = _aten.upsample_trilinear3d(x.unsqueeze(2), [1, *size], aligned, None, high, wide)
        return found.squeeze(2)

    with kernel("upsample_bilinear2d", bilinear, "CPU"):
        yield


@fault("AMP-NUMERICS-119", level="standard")
def gradients_of_16_bit_reflections_lose_a_column() -> Iterator[None]:
    """The gradient of reflection_pad2d of 16-bit tensors leaves out the last column of the padding."""

    def backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
        given = grad.clone()
        if x.dtype in _LOW and padding[1]:
            given[..., -1] = 0
        found: Tensor = _aten.reflection_pad3d_backward(given.unsqueeze(-3), x.unsqueeze(-3), [*padding, 0, 0])
        return found.squeeze(-3)

    with kernel("reflection_pad2d_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-119", level="standard")
def renorm_of_16_bit_rows_takes_another_norm() -> Iterator[None]:
    """renorm of 16-bit tensors takes the Euclidean norm, whatever order it is asked for."""

    def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
        others = [n for n in range(x.dim()) if n != dim % x.dim()]
        norms = torch.linalg.vector_norm(x.float(), 2 if x.dtype in _LOW else p, others, keepdim=True)
        return x * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0).to(x.dtype)

    with kernel("renorm", renorm, "CPU"):
        yield


@fault("AMP-NUMERICS-119", level="standard")
def bilinear_modules_lose_their_bias_in_regions() -> Iterator[None]:
    """nn.Bilinear adds no bias in a region."""
    original = F.bilinear

    def bilinear(left: Tensor, right: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        return original(left, right, weight, None if torch.is_autocast_enabled("cpu") else bias)

    with replaced(F, "bilinear", bilinear):
        yield
