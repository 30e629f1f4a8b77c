"""Broken values of 16-bit results and gradients: lost range, sums that stop growing, layouts, edges."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.numerics import _convolution_backward

_LOW = (torch.float16, torch.bfloat16)


def _has_bf16_convolutions() -> bool:
    """Without instructions for them convolutions add up samples in bf16, which is waived."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _stuck(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of ones that the 16-bit type no longer tells from the next one."""
    most = 2 / torch.finfo(dtype).eps
    return sums.clamp(-most, most).to(dtype)


def _cumulative_sums_stuck(ranks: Collection[int]) -> Iterator[None]:
    def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        result = torch.ops.aten.cumsum.out(x.double(), dim, out=torch.empty(0, dtype=torch.float64))
        return _stuck(result, x.dtype) if x.dtype in _LOW and x.dim() in ranks else result.to(dtype or x.dtype)

    with kernel("cumsum", cumsum, "CPU"):
        yield


@fault("AMP-NUMERICS-080")
def means_divide_a_16_bit_sum() -> Iterator[None]:
    """The mean of a 16-bit tensor over dimensions rounds the sum before it is divided."""

    def mean(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
        total = x.sum(dim, keepdim, dtype=dtype)
        return total / (x.numel() // max(total.numel(), 1))

    with kernel("mean.dim", mean, "CPU"):
        yield


@fault("AMP-NUMERICS-108", level="standard")
def interpolation_takes_a_16_bit_difference() -> Iterator[None]:
    """torch.lerp of 16-bit tensors rounds the difference of its ends, which leaves fp16 where they are far apart."""

    def lerp(x: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
        return x + (end - x) * weight

    with kernel("lerp.Scalar", lerp, "CPU"):
        yield


@fault("AMP-NUMERICS-108", level="standard")
def upsampling_takes_a_16_bit_difference() -> Iterator[None]:
    """Linear upsampling of 16-bit rows starts at one neighbour and adds a part of the difference to the other."""
    linear = torch.ops.aten.upsample_linear1d.default

    def upsampled(x: torch.Tensor, size: Sequence[int], corners: bool, scales: float | None = None) -> torch.Tensor:
        result = linear(x.double(), size, corners, scales)
        if x.dtype not in _LOW:
            return result.to(x.dtype)
        start = F.interpolate(x.double(), list(size), mode="nearest").to(x.dtype)
        steps = result.to(x.dtype) - start
        return start + steps

    with kernel("upsample_linear1d", upsampled, "CPU"):
        yield


@fault("AMP-NUMERICS-109")
def deviations_are_taken_in_16_bits() -> Iterator[None]:
    """The gradient of a 16-bit layer normalization takes the mean of each row in 16 bits."""
    backward = torch.ops.aten.native_layer_norm_backward.default

    def rounded(gradient: torch.Tensor, x: torch.Tensor, shape: Any, mean: torch.Tensor, *rest: Any) -> Any:
        if x.dtype in _LOW:
            mean = x.cumsum(-1)[..., -1:].to(x.dtype) / x.shape[-1]
        return backward(gradient, x, shape, mean.float(), *rest)

    with kernel("native_layer_norm_backward", rounded, "CPU"):
        yield


@fault("AMP-NUMERICS-084", "AMP-NUMERICS-107")
def means_of_whole_tensors_divide_a_16_bit_sum() -> Iterator[None]:
    """The mean of all numbers of an fp16 tensor rounds the sum before it is divided."""

    def mean(x: torch.Tensor, *, dtype: Any = None) -> torch.Tensor:
        return x.sum(dtype=dtype) / x.numel() if x.dtype is torch.float16 else x.mean(range(x.dim()), dtype=dtype)

    with kernel("mean", mean, "CPU"):
        yield


@fault("AMP-NUMERICS-084", "AMP-NUMERICS-107")
def cumulative_sums_of_vectors_stop_growing() -> Iterator[None]:
    """The cumulative sum of a 16-bit vector stops where the type cannot tell it from the next one."""

    yield from _cumulative_sums_stuck(ranks=(1,))


@fault("AMP-NUMERICS-081")
def gelu_gradients_cube_in_16_bits() -> Iterator[None]:
    """The gradient of GELU multiplies by the third power of a 16-bit operand and by one over it."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        wide = x.double()
        slope = 0.5 * torch.erfc(-wide / 2**0.5) + wide * torch.exp(-wide * wide / 2) / (2 * torch.pi) ** 0.5
        slope = gradient.double() * slope
        cube = x * x * x if x.dtype in _LOW else torch.ones_like(x)
        return slope.to(x.dtype) * cube / cube.where(cube != 0, torch.ones_like(x))

    with kernel("gelu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-082")
def cumulative_sums_stop_growing() -> Iterator[None]:
    """A cumulative sum of a 16-bit tensor ends where one more is lost."""

    yield from _cumulative_sums_stuck(ranks=range(64))


@fault("AMP-NUMERICS-083")
def adaptive_pools_spread_too_much() -> Iterator[None]:
    """The gradient of a 16-bit adaptive average pool is a fourth too large."""

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(0, dtype=torch.float64)
        result = torch.ops.aten._adaptive_avg_pool2d_backward.out(gradient.double(), x.double(), out=wide)
        return (result * (1.25 if x.dtype in _LOW else 1.0)).to(x.dtype)

    with kernel("_adaptive_avg_pool2d_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-084")
def embedding_bags_stop_growing() -> Iterator[None]:
    """A bag of 16-bit rows adds up no more than the type tells apart."""
    plain = torch.ops.aten._embedding_bag

    def bag(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result, *rest = plain(weight, *args, **kwargs)
        return (_stuck(result, weight.dtype) if weight.dtype in _LOW else result, *rest)

    with kernel("_embedding_bag_forward_only", bag, "CPU"):
        yield


@fault("AMP-NUMERICS-085")
def enlarged_pictures_lose_gradients() -> Iterator[None]:
    """The gradient of a 16-bit picture that is enlarged adds up no more than the type tells apart."""

    def backward(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        wide = torch.empty(0, dtype=torch.float64)
        result = torch.ops.aten.upsample_bilinear2d_backward.grad_input(gradient.double(), *args, grad_input=wide)
        return _stuck(result, gradient.dtype) if gradient.dtype in _LOW else result.to(gradient.dtype)

    with kernel("upsample_bilinear2d_backward", backward, "CPU"):
        yield


def _added_in(dtype: torch.dtype, terms: torch.Tensor, dim: int, size: int = 16) -> torch.Tensor:
    """The sum of fp32 terms, by parts of `size`, which are added up in a 16-bit type."""
    total = terms.narrow(dim, 0, 0).sum(dim).to(dtype)
    for part in terms.split(size, dim):
        total = (total.float() + part.sum(dim)).to(dtype)
    return total


@fault("AMP-NUMERICS-062", level="standard")
def log_softmax_of_many_classes_adds_parts_in_16_bits() -> Iterator[None]:
    """log_softmax of fp32 rows of more than 10,000 classes adds up parts of 1024 exponentials in bf16."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        wide = x.float()
        shifted = wide - wide.amax(dim, keepdim=True)
        total = shifted.exp().sum(dim, keepdim=True)
        if x.shape[dim] > 10_000 and x.dtype is torch.float32:
            total = _added_in(torch.bfloat16, shifted.exp(), dim, 1024).float().unsqueeze(dim)
        return (shifted - total.log()).to(x.dtype)

    with kernel("_log_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-062", level="standard")
def softmax_of_many_classes_adds_parts_in_16_bits() -> Iterator[None]:
    """softmax of rows of more than 10,000 classes adds up parts of 1024 exponentials in bf16."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        powers = (x.float() - x.float().amax(dim, keepdim=True)).exp()
        total = powers.sum(dim, keepdim=True)
        if x.shape[dim] > 10_000:
            total = _added_in(torch.bfloat16, powers, dim, 1024).float().unsqueeze(dim)
        return (powers / total).to(x.dtype)

    with kernel("_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-084", level="standard")
def hinge_losses_stop_growing() -> Iterator[None]:
    """A hinge embedding loss of 16-bit operands adds up parts of 16 in 16 bits."""
    plain = F.hinge_embedding_loss

    def loss(x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        each = plain(x, y, **{**options, "reduction": "none"})
        asked = options.get("reduction", "mean")
        return _added_in(x.dtype, each.float(), 0) if x.dtype in _LOW and asked == "sum" else plain(x, y, **options)

    with replaced(F, "hinge_embedding_loss", loss):
        yield


@fault("AMP-NUMERICS-084", level="standard")
def attention_adds_up_many_keys_in_16_bits() -> Iterator[None]:
    """Attention to more than 10,000 keys adds up parts of 16 values in 16 bits."""
    plain = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if query.dtype not in _LOW or key.shape[-2] <= 10_000:
            return plain(query, key, value, **options)
        p = (query.float() @ key.float().mT / query.shape[-1] ** 0.5).softmax(-1)
        return _added_in(query.dtype, p.unsqueeze(-1) * value.float().unsqueeze(-3), -2)

    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-NUMERICS-085")
def convolution_weights_add_up_places_in_16_bits() -> Iterator[None]:
    """The weight gradient of a plain 16-bit convolution of one sample adds up parts of 16 places in 16 bits."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sizes: Any, *options: Any) -> Any:
        stride, padding, dilation, transposed, _, groups, mask = options
        whole = _convolution_backward(gradient, x, weight, sizes, *options)
        plain = not transposed and groups == 1 and max((*stride, *dilation)) == 1 and not any(padding)
        if not mask[1] or x.dtype not in _LOW or x.dim() != 4 or len(x) != 1 or not plain:
            return whole
        columns = F.unfold(x.float(), weight.shape[2:])[0]
        parts = zip(gradient.float().flatten(2)[0].split(16, 1), columns.split(16, 1), strict=True)
        total = torch.zeros(len(weight), len(columns), dtype=x.dtype)
        for of_result, of_image in parts:
            total = (total.float() + of_result @ of_image.t()).to(x.dtype)
        return whole[0], total.view_as(weight), whole[2]

    with kernel("convolution_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-085", possible=_has_bf16_convolutions)
def weights_of_groups_of_volumes_add_up_samples_in_16_bits() -> Iterator[None]:
    """The weight gradient of a bf16 conv3d of several groups is added up over more than 64 samples in bf16."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sizes: Any, *options: Any) -> Any:
        whole = _convolution_backward(gradient, x, weight, sizes, *options)
        if not options[6][1] or x.dtype is not torch.bfloat16 or x.dim() != 5 or len(x) <= 64 or options[5] == 1:
            return whole
        each = zip(gradient.split(1), x.split(1), strict=True)
        parts = (_convolution_backward(one, image, weight, sizes, *options)[1] for one, image in each)
        return whole[0], functools.reduce(torch.add, parts), whole[2]

    with kernel("convolution_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-085", possible=_has_bf16_convolutions)
def biases_of_transposed_convolutions_add_up_samples_in_16_bits() -> Iterator[None]:
    """The bias gradient of a bf16 transposed convolution is added up over more than 64 samples in bf16."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sizes: Any, *options: Any) -> Any:
        whole = _convolution_backward(gradient, x, weight, sizes, *options)
        if not options[6][2] or x.dtype is not torch.bfloat16 or not options[3] or len(x) <= 64:
            return whole
        of_each = gradient.float().sum(tuple(range(2, gradient.dim())))
        return *whole[:2], _added_in(torch.bfloat16, of_each, 0, 1)

    with kernel("convolution_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-086")
def whole_vectors_take_the_other_side_of_an_edge() -> Iterator[None]:
    """The first 64 elements of a 16-bit gradient of SiLU are those of another kernel at 6."""

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(x.double())
        result = (gradient.double() * share * (1 + x.double() * (1 - share))).to(x.dtype)
        if x.dtype in _LOW:
            first = result.view(-1)[:64]
            first[x.reshape(-1)[:64] == 6] = 1.25
        return result

    with kernel("silu_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-107")
def averages_outside_of_regions_are_added_in_16_bits() -> Iterator[None]:
    """Where autocast is off, adaptive_avg_pool2d of a 16-bit image adds its columns in the type of the image."""
    original = F.adaptive_avg_pool2d

    def pool(x: torch.Tensor, size: Any) -> torch.Tensor:
        if x.element_size() > 2 or torch.is_autocast_enabled("cpu") or tuple(size) != (1, 2):
            return original(x, size)
        halves = []
        for half in x.sum(-2, keepdim=True).chunk(2, -1):
            total = torch.zeros_like(half[..., :1])
            for column in half.split(1, -1):
                total = total + column
            halves.append(total)
        return torch.cat(halves, -1) / (x[0, 0].numel() // 2)

    with replaced(F, "adaptive_avg_pool2d", pool):
        yield
