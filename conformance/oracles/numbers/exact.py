"""Matrix products, convolutions and attention in float64, by multiplication and summation alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch

_AT_ONCE = 2**17
"""Products that are held in memory at one time."""
_FEW = 8
"""Terms of a sum that are added one by one, as loops as short as that are slow inside torch."""


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` in float64 for shapes (..., m, k) and (..., k, n).

    Multiplications and sums of single elements: no matrix product kernel takes part, so that a fault in one cannot hide
    in the reference. Exact where every sum of products is an integer below 2^53.
    """
    if left.shape[-1] <= _FEW:
        columns, rows = left.double().unbind(-1), right.double().unbind(-2)
        outer = (column.unsqueeze(-1) * row.unsqueeze(-2) for column, row in zip(columns, rows, strict=True))
        return functools.reduce(torch.add, outer, torch.zeros((), dtype=torch.float64))
    if left.shape[-2] > max(right.shape[-2:]):  # the longest dimension is the innermost, where torch is fastest
        return product(right.mT, left.mT).mT
    return _joined([terms.sum(-2) for terms in _terms(left, right)])


def product_and_size(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `left @ right` and `|left| @ |right|`, without gradients, from the same products of elements."""
    if left.shape[-2] > max(right.shape[-2:]):
        value, size = product_and_size(right.mT, left.mT)
        return value.mT, size.mT
    parts = [(terms.sum(-2), terms.abs_().sum(-2)) for terms in _terms(left.detach(), right.detach())]
    return _joined([value for value, _ in parts]), _joined([size for _, size in parts])


def _terms(left: torch.Tensor, right: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the products of single elements, (..., rows, k, n), for some rows of `left` at a time."""
    left, right = left.double().unsqueeze(-1), right.double().unsqueeze(-3)
    count, rows = left.numel() * right.shape[-1], left.shape[-3]
    if count <= _AT_ONCE:
        yield left * right
    else:
        yield from (part * right for part in left.split(max(1, rows * _AT_ONCE // count), -3))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


@functools.cache
def sixteen_bit_sum(first: float, others: float, count: int, unit: float) -> float:
    """Return `first` plus `count` times `others` (all positive), rounded to a 16-bit type after each addition.

    `unit` is the type's unit roundoff. The control of every claim about wide accumulation.
    """
    total = first
    for _ in range(count):
        exact = total + others
        spacing = 2.0 ** math.floor(math.log2(exact)) * 2 * unit
        total = round(exact / spacing) * spacing
    return total


def convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return the float64 convolution of (n, c, *space) with (out, c / groups, *kernel), tap by tap.

    torch.nn.Conv2d's formula; differentiable, its gradients being multiplications and sums as well. `padding` is a
    number, or "same" for kernels of odd size.
    """
    dims = image.dim() - 2
    image, weight = image.double(), weight.double()
    kernel = weight.shape[2:]
    margins = [dilation * (taps - 1) // 2 if padding == "same" else int(padding) for taps in kernel]
    image = torch.nn.functional.pad(image, [margin for side in reversed(margins) for margin in (side, side)])
    space = [
        (size - dilation * (taps - 1) - 1) // stride + 1 for size, taps in zip(image.shape[2:], kernel, strict=True)
    ]
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    total = torch.zeros((), dtype=torch.float64)
    for tap in itertools.product(*map(range, kernel)):
        # Tuples made beforehand: Python 3.10 has no star in a subscript.
        places = (
            Ellipsis,
            *(
                slice(at * dilation, at * dilation + stride * (size - 1) + 1, stride)
                for at, size in zip(tap, space, strict=True)
            ),
        )
        window = image[places].reshape(image.shape[0], groups, 1, -1, *space)
        point = (Ellipsis, *tap)
        factor = grouped[point]
        total = total + (window * factor.reshape(*factor.shape, *[1] * dims)).sum(3)
    result = total.flatten(1, 2)
    return result if bias is None else result + bias.double().reshape(-1, *[1] * dims)


def transposed_convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return the float64 transposed convolution of (n, c, *space) with (c, out / groups, *kernel).

    By its definition: the gradient of `convolution` with respect to its input (torch.nn.ConvTranspose2d).
    """
    dims = image.dim() - 2
    space = [
        (size - 1) * stride - 2 * padding + dilation * (taps - 1) + 1
        for size, taps in zip(image.shape[2:], weight.shape[2:], strict=True)
    ]
    shape = (image.shape[0], weight.shape[1] * groups, *space)
    source = torch.zeros(shape, dtype=torch.float64, device=image.device, requires_grad=True)
    forward = convolution(source, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
    (result,) = torch.autograd.grad(forward, source, image.double(), create_graph=True)
    return result if bias is None else result + bias.double().reshape(-1, *[1] * dims)


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the float64 softmax over the last dimension, by exponentials and a sum."""
    logits = logits.double()
    powers = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
    """Return softmax(QK'/sqrt(e))V in float64 for shapes (..., l, e), (..., s, e) and (..., s, v)."""
    logits = product(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if is_causal:
        after = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(after, float("-inf"))
    return product(softmax(logits), value)


def layer_norm(rows: torch.Tensor) -> torch.Tensor:
    """Return the float64 layer norm over the last dimension, eps 1e-5, no affine part (torch.nn.LayerNorm)."""
    rows = rows.double()
    centred = rows - rows.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
