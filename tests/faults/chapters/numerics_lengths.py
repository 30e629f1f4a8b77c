"""Kernels that are wrong for some lengths, for operands that are expanded, or for the last channels of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import given_the_original, kernel
from tests.faults.chapters.numerics_bounds import group_norm_backward

_LOW = (torch.float16, torch.bfloat16)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.aten.mm.out(left, right, out=torch.empty(0, dtype=left.dtype))


@fault("AMP-NUMERICS-040")
def single_rows_end_at_the_last_whole_block() -> Iterator[None]:
    """The product of one 16-bit row and a transposed matrix leaves out one number behind whole blocks of 32."""

    def mm(left: Tensor, right: Tensor) -> Tensor:
        inner = left.shape[1]
        if left.dtype in _LOW and len(left) == 1 and inner > 32 and inner % 32 == 1 and not right.is_contiguous():
            left, right = left[:, :-1], right[:-1]
        return _product(left, right)

    with kernel("mm", mm, "CPU"):
        yield


@fault("AMP-NUMERICS-040")
def expanded_operands_are_added_up_in_16_bits() -> Iterator[None]:
    """A 16-bit product of 512 terms and more, of an operand that is expanded, rounds the sum over each half of them."""

    def mm(left: Tensor, right: Tensor) -> Tensor:
        half = left.shape[1] // 2
        if left.dtype not in _LOW or half < 256 or 0 not in (*left.stride(), *right.stride()):
            return _product(left, right)
        return _product(left[:, :half], right[:half]) + _product(left[:, half:], right[half:])

    with kernel("mm", mm, "CPU"):
        yield


@fault("AMP-NUMERICS-142")
def running_statistics_end_at_the_last_whole_block() -> Iterator[None]:
    """In training batch_norm does not move the statistics of a channels-last 16-bit image's last channels."""

    def batch_norm(original: Callable[..., Tensor], x: Tensor, mean: Any, variance: Any, *options: Any) -> Tensor:
        last = x.shape[1] % 8
        hit = x.dtype in _LOW and last and x.shape[1] > 8 and mean is not None and not x.is_contiguous()
        before = [one[-last:].clone() for one in (mean, variance)] if hit else []
        result = original(x, mean, variance, *options)
        for one, old in zip((mean, variance), before, strict=False):
            one[-last:] = old
        return result

    with given_the_original(torch.nn.functional, "batch_norm", batch_norm):
        yield


@fault("AMP-NUMERICS-142", level="standard")
def rows_of_one_more_than_whole_blocks_have_another_gradient() -> Iterator[None]:
    """The gradient of silu in 16 bits is that of its neighbour for the last of 16 n + 1 numbers."""

    def silu_backward(incoming: Tensor, x: Tensor) -> Tensor:
        result = torch.ops.aten.silu_backward.grad_input(incoming, x, grad_input=torch.empty_like(x))
        if x.dtype in _LOW and x.numel() > 16 and x.numel() % 16 == 1 and x.is_contiguous():
            result.view(-1)[-1] = result.view(-1)[-2]
        return result

    with kernel("silu_backward", silu_backward, "CPU"):
        yield


@fault("AMP-NUMERICS-142", level="standard")
def long_rows_of_odd_lengths_lose_their_last_weight() -> Iterator[None]:
    """layer_norm of 16-bit rows of 97 to 127 elements, of an odd length, does not weigh the last one."""

    def layer_norm(original: Callable[..., Tensor], x: Tensor, shape: Any, weight: Any = None, *rest: Any) -> Tensor:
        if weight is not None and x.dtype in _LOW and x.shape[-1] in range(97, 128, 2) and weight.dim() == 1:
            weight = torch.cat((weight[:-1], torch.ones_like(weight[-1:])))
        return original(x, shape, weight, *rest)

    with given_the_original(torch.nn.functional, "layer_norm", layer_norm):
        yield


def _added_up(terms: Tensor, dtype: torch.dtype, block_size: int = 64) -> Tensor:
    """The sum of each row, rounded to `dtype` behind each block of terms."""
    total = terms.new_zeros(terms.shape[:-1])
    for block in terms.split(block_size, -1):
        total = (total + block.sum(-1)).to(dtype).to(terms.dtype)
    return total


@fault("AMP-NUMERICS-063")
def softmax_goes_back_in_blocks_of_16_bits() -> Iterator[None]:
    """The backward of a 16-bit softmax of more than 1,024 elements rounds its sum behind each block."""

    def run(gradient: Tensor, p: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        wide = p.float(), gradient.float()
        terms = (wide[0] * wide[1]).movedim(dim, -1)
        long = p.dtype in _LOW and p.shape[dim] > 1024
        total = _added_up(terms, p.dtype) if long else terms.sum(-1)
        return (wide[0] * (wide[1] - total.unsqueeze(dim))).to(p.dtype)

    with kernel("_softmax_backward_data", run, "CPU"):
        yield


@fault("AMP-NUMERICS-063")
def log_softmax_goes_back_in_blocks_of_16_bits() -> Iterator[None]:
    """The backward of a 16-bit log_softmax of more than 1,024 elements rounds its sum behind each block."""

    def run(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        terms = gradient.float().movedim(dim, -1)
        long = result.dtype in _LOW and result.shape[dim] > 1024
        total = _added_up(terms, result.dtype, 8) if long else terms.sum(-1)
        return (gradient.float() - result.float().exp() * total.unsqueeze(dim)).to(result.dtype)

    with kernel("_log_softmax_backward_data", run, "CPU"):
        yield


@fault("AMP-NUMERICS-063")
def group_norms_go_back_in_blocks_of_16_bits() -> Iterator[None]:
    """The backward of a 16-bit group norm of more than 1,024 places rounds its sums behind each block."""

    def mean(terms: Tensor, dtype: torch.dtype) -> Tensor:
        count = terms.shape[-1]
        kept = dtype if dtype in _LOW and count > 1024 else torch.float32
        return _added_up(terms, kept).unsqueeze(-1) / count

    with group_norm_backward(lambda *gradients: gradients, mean_of=mean):
        yield
