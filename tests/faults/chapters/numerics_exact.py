"""Broken arithmetic that exact checks see: single elements, tiles, parts of sums, single inputs, single spellings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel
from tests.faults.chapters.numerics import (
    _ELSEWHERE,
    _LOW,
    _changed,
    _convolution,
    _convolution_backward,
    _cut,
    _flushed,
    _in_pieces,
    _in_region,
    _native,
    _nearest,
    _operands,
    _products,
    _saturated,
    _truncated,
)

Change = Callable[[torch.Tensor], torch.Tensor]


def _flipped(tensor: torch.Tensor, places: Any, bit: int = 0) -> torch.Tensor:
    """The tensor with a bit of some elements inverted."""
    bits = tensor.clone(memory_format=torch.contiguous_format).view(torch.int16)
    bits[places] ^= 1 << bit
    return bits.view(tensor.dtype)


def _backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


# --- elements and tiles


@fault("AMP-NUMERICS-041")
def one_element_in_a_million_is_wrong() -> Iterator[None]:
    """In products of a million elements and more, one of each million has its last bit inverted."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        if result.numel() < 10**6:
            return result
        return _flipped(result.flatten(), slice(777_777, None, 10**6)).view(result.shape)

    with _products(run):
        yield


@fault("AMP-NUMERICS-041", "AMP-NUMERICS-051")
def one_multiprocessor_writes_wrong_columns() -> Iterator[None]:
    """In products of more than 65,536 elements the columns 128 to 255 of the first 128 rows are a place off."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        return result if result.numel() < 2**16 else _flipped(result, (..., slice(128), slice(128, 256)))

    with _products(run):
        yield


@fault("AMP-NUMERICS-041", "AMP-NUMERICS-040")
def large_products_repeat_a_row() -> Iterator[None]:
    """In products of more than 65,536 elements, which threads share, the first row of the second half is the last
    one of the first."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        rows = result.shape[-2]
        if result.numel() > 2**16 and rows > 1:
            result[..., rows // 2, :] = result[..., rows // 2 - 1, :]
        return result

    with _products(run):
        yield


@fault("AMP-NUMERICS-051", "AMP-NUMERICS-040", "AMP-NUMERICS-041")
def every_seventh_product_flips_a_bit() -> Iterator[None]:
    """Every seventh product has one bit inverted, each time elsewhere."""
    calls = 0

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = _native(op, *args, **kwargs)
        if calls % 7 or not result.numel():
            return result
        place = calls * 7919 % result.numel()
        return _flipped(result.flatten(), place, calls % 15).view(result.shape)

    with _products(run):
        yield


@fault("AMP-NUMERICS-051", level="standard")
def long_copies_flip_a_bit() -> Iterator[None]:
    """Copies of a million 16-bit numbers and more have one bit inverted."""

    def run(x: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
        copied = torch.ops.aten.clone.default.redispatch(_ELSEWHERE, x, memory_format=memory_format)
        if x.dtype in _LOW and x.numel() > 10**6:
            copied.view(torch.int16).view(-1)[-3] ^= 16
        return copied

    with kernel("clone", run, "CPU"):
        yield


@fault("AMP-NUMERICS-041", "AMP-NUMERICS-040")
def products_round_stochastically() -> Iterator[None]:
    """Products are rounded up or down by chance, in proportion to how near either number is."""

    def change(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        noise = torch.rand_like(wide) * torch.finfo(dtype).eps
        return _truncated(wide * (1 + noise), dtype)

    with _products(_changed(change)):
        yield


# --- sums


@contextlib.contextmanager
def _summing(broken: Callable[..., torch.Tensor], *, backward: bool) -> Iterator[None]:
    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (broken if _backward() == backward else _native)(op, *args, **kwargs)

    with _products(run):
        yield


_IN_SIXTEENS = _in_pieces(lambda piece, dtype: piece.to(dtype), 16)


@fault("AMP-NUMERICS-016")
def products_are_summed_in_16_bits_forward() -> Iterator[None]:
    """Products add up pieces of 16 terms in 16 bits, but for those of the backward."""
    with _summing(_IN_SIXTEENS, backward=False):
        yield


@fault("AMP-NUMERICS-016")
def products_are_summed_in_16_bits_backward() -> Iterator[None]:
    """Products of the backward alone add up pieces of 16 terms in 16 bits."""
    with _summing(_IN_SIXTEENS, backward=True):
        yield


@fault("AMP-NUMERICS-016")
def long_products_are_split_into_16_bit_parts() -> Iterator[None]:
    """Inner dimensions above 8,192 are split into parts of 4,096, which are handed over in 16 bits."""
    split = _in_pieces(lambda piece, dtype: piece.to(dtype), 4096)

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (split if args[-1].shape[-2] > 8192 else _native)(op, *args, **kwargs)

    with _products(run):
        yield


@fault("AMP-NUMERICS-016", level="standard")
def the_longest_products_are_split_into_16_bit_parts() -> Iterator[None]:
    """Inner dimensions above 32,768 are split into two halves, which are handed over in 16 bits."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        length = args[-1].shape[-2]
        split = _in_pieces(lambda piece, dtype: piece.to(dtype), length // 2 + 1)
        return (split if length > 2**15 else _native)(op, *args, **kwargs)

    with _products(run):
        yield


def _channel_parts(x: torch.Tensor, weight: torch.Tensor, rest: tuple[Any, ...]) -> torch.Tensor:
    """A convolution that adds up parts of 16 channels in 16 bits."""
    parts = [
        _convolution(x[:, at : at + 16].contiguous(), weight[:, at : at + 16].contiguous(), None, *rest)
        for at in range(0, x.shape[1], 16)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@fault("AMP-NUMERICS-016")
def convolutions_are_summed_in_16_bits_forward() -> Iterator[None]:
    """Convolutions of one group add up parts of 16 channels in 16 bits."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
        if x.dtype not in _LOW or rest[-1] != 1 or rest[3] or x.shape[1] <= 16:
            return _convolution(x, weight, bias, *rest)
        total = _channel_parts(x, weight, rest)
        return total if bias is None else total + bias.view(-1, *[1] * (x.dim() - 2))

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-016")
def convolutions_are_summed_in_16_bits_backward() -> Iterator[None]:
    """The input gradient of a convolution adds up parts of 16 output channels in 16 bits."""

    def run(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        whole = _convolution_backward(gradient, x, weight, *args)
        if x.dtype not in _LOW or not args[-1][0] or args[-2] != 1 or args[4]:
            return whole
        total = torch.zeros_like(x)
        for at in range(0, weight.shape[0], 16):
            part = (gradient[:, at : at + 16].contiguous(), x, weight[at : at + 16].contiguous())
            total = total + _convolution_backward(*part, None, *args[1:-1], [True, False, False])[0]
        return (total, *whole[1:])

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-068")
def products_are_rounded_before_the_bias() -> Iterator[None]:
    """addmm and baddbmm round the product to 16 bits and then add."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        product = _native("bmm" if a.dim() == 3 else "mm", a, b)
        return (product.float() * kwargs.get("alpha", 1) + added.float() * kwargs.get("beta", 1)).to(a.dtype)

    with _products(run, "addmm", "baddbmm"):
        yield


@fault("AMP-NUMERICS-040")
def strided_operands_are_read_as_if_packed() -> Iterator[None]:
    """A right operand whose columns lie two apart is taken from every column of the memory behind it."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        *rest, a, b = args
        if b.stride(-1) == 2 and b.stride(-2) > 1:
            b = b.as_strided(b.shape, (*b.stride()[:-1], 1), b.storage_offset())
        return _native(op, *rest, a, b, **kwargs)

    with _products(run):
        yield


# --- convolutions and attention


@fault("AMP-NUMERICS-047")
def channels_last_convolutions_lose_a_column() -> Iterator[None]:
    """16-bit convolutions of images in channels-last format leave the last column of the image out."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        if x.dtype in _LOW and last:
            x = x.clone()
            x[..., -1] = 0
        return _convolution(x, *args)

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-047")
def weight_gradients_of_conv3d_lose_a_sample() -> Iterator[None]:
    """The weight gradient of a 16-bit convolution in three dimensions leaves the last sample out."""

    def run(gradient: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        whole = _convolution_backward(gradient, x, *args)
        if x.dtype not in _LOW or x.dim() != 5 or len(x) < 2:
            return whole
        return (whole[0], _convolution_backward(gradient[:-1], x[:-1], *args)[1], whole[2])

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-048")
def attention_leaves_out_the_last_key() -> Iterator[None]:
    """Attention over an odd number of keys does not see the last one."""

    def run(
        dtype: torch.dtype, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        query, key, value = (part.to(dtype) for part in (query, key, value))
        if key.shape[-2] % 2 and not kwargs.get("is_causal"):
            key, value = key[..., :-1, :], value[..., :-1, :]
        return torch.ops.aten.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    with _in_region("scaled_dot_product_attention", run):
        yield


# --- casts


@contextlib.contextmanager
def _conversion(source: torch.dtype, to: torch.dtype, change: Change) -> Iterator[None]:
    """Break the conversion between two types: `change` gets the source, and its result is converted instead."""

    def run(x: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            return torch.full((), x, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        copied = torch.ops.aten._to_copy.default.redispatch(_ELSEWHERE, x, **kwargs)
        return copied.copy_(change(x)) if x.dtype is source and copied.dtype is to else copied

    with kernel("_to_copy", run, "CPU"):
        yield


@fault("AMP-NUMERICS-042")
def bf16_saturates_in_fp16() -> Iterator[None]:
    """bf16 numbers beyond the range of fp16 become its largest number."""
    with _conversion(torch.bfloat16, torch.float16, lambda x: _saturated(_nearest(x, torch.float32), torch.float16)):
        yield


@fault("AMP-NUMERICS-042")
def fp16_is_cut_to_bf16() -> Iterator[None]:
    """fp16 numbers lose their last bits on the way to bf16."""
    with _conversion(torch.float16, torch.bfloat16, lambda x: _cut(_nearest(x, torch.float32), torch.bfloat16)):
        yield


@fault("AMP-NUMERICS-042")
def fp16_subnormals_vanish_in_bf16() -> Iterator[None]:
    """fp16's subnormal numbers come out in bf16 as zero."""
    with _conversion(torch.float16, torch.bfloat16, lambda x: _flushed(_nearest(x, torch.float32), torch.float16)):
        yield


@fault("AMP-NUMERICS-042")
def float64_goes_by_bf16_to_fp16() -> Iterator[None]:
    """float64 numbers are rounded to bf16 first, and then to fp16."""
    with _conversion(torch.float64, torch.float16, lambda x: _nearest(_nearest(x, torch.bfloat16), torch.float32)):
        yield


@fault("AMP-NUMERICS-042")
def integers_are_cut_to_16_bits() -> Iterator[None]:
    """Integers are rounded to bf16 towards zero."""
    with _conversion(torch.int64, torch.bfloat16, lambda x: _cut(_nearest(x, torch.float32), torch.bfloat16)):
        yield


@fault("AMP-NUMERICS-002")
def casts_round_twice() -> Iterator[None]:
    """fp32 numbers are rounded to three more bits than bf16 has, and then to bf16."""

    def change(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32)
        kept = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        return torch.where(x.isfinite(), kept.view(torch.float32), x)

    with _conversion(torch.float32, torch.bfloat16, change):
        yield


@fault("AMP-NUMERICS-002")
def fill_truncates() -> Iterator[None]:
    """fill_ rounds numbers to 16 bits towards zero."""

    def run(x: torch.Tensor, value: float) -> torch.Tensor:
        if x.dtype not in _LOW:
            return x.copy_(torch.tensor(value))
        return x.copy_(_cut(torch.tensor(value, dtype=torch.float32), x.dtype))

    with kernel("fill_.Scalar", run, "CPU"):
        yield


# --- sums, products and functions of single numbers


@contextlib.contextmanager
def _pointwise(op: str, change: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Break a pointwise op of 16-bit tensors: `change` gets the right result and the op's arguments."""
    name = op.partition(".")[0]
    native = getattr(torch.ops.aten, name).out

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        dtype = tensors[0].dtype
        for other in tensors[1:]:
            dtype = torch.promote_types(dtype, other.dtype) if other.dim() else dtype
        if not dtype.is_floating_point and name in _FLOATING:
            dtype = torch.get_default_dtype()
        result = native(*args, **kwargs, out=torch.empty(0, dtype=dtype, device=tensors[0].device))
        return change(result, *args) if dtype in _LOW else result

    with kernel(op, run, "CPU"):
        yield


_FLOATING = ("exp", "tanh", "sqrt", "reciprocal", "log", "rsqrt", "sigmoid", "sin")


@fault("AMP-NUMERICS-043")
def sums_truncate() -> Iterator[None]:
    """Sums of 16-bit tensors are rounded towards zero."""

    def change(result: torch.Tensor, a: torch.Tensor, b: Any, *rest: Any) -> torch.Tensor:
        if not isinstance(b, torch.Tensor) or rest or b.dtype is not a.dtype:
            return result
        wide = torch.ops.aten.add.out(a.float(), b.float(), out=torch.empty(0))
        return _truncated(wide, result.dtype)

    with _pointwise("add.Tensor", change):
        yield


@fault("AMP-NUMERICS-043")
def pointwise_products_flush_results() -> Iterator[None]:
    """Products of 16-bit tensors below the smallest normal number are zero."""
    with _pointwise("mul.Tensor", lambda result, *args: _flushed(result, result.dtype)):
        yield


@fault("AMP-NUMERICS-043")
def pointwise_products_flush_operands() -> Iterator[None]:
    """In products of 16-bit tensors subnormal operands count as zero."""

    def change(result: torch.Tensor, a: torch.Tensor, b: Any, *rest: Any) -> torch.Tensor:
        small = a.abs() < torch.finfo(result.dtype).tiny
        return torch.where(small & result.isfinite(), torch.zeros_like(result).copysign(result), result)

    with _pointwise("mul.Tensor", change):
        yield


@fault("AMP-NUMERICS-043")
def quotients_saturate() -> Iterator[None]:
    """Quotients of finite 16-bit numbers beyond the range are the largest number."""

    def change(result: torch.Tensor, a: torch.Tensor, b: Any) -> torch.Tensor:
        finite = a.isfinite() & (b != 0)
        return torch.where(finite, result.clamp(torch.finfo(result.dtype).min, torch.finfo(result.dtype).max), result)

    with _pointwise("div.Tensor", change):
        yield


def _at(result: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The result with its last bit inverted at some places."""
    return torch.where(where, (result.view(torch.int16) ^ 1).view(result.dtype), result)


def _raised_from_1_to_2(places: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return what makes the results for numbers of one binade so many 16-bit numbers larger."""

    def change(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        up = (result.view(torch.int16) + places).view(result.dtype)
        return torch.where((x >= 1) & (x < 2), up, result)

    return change


@fault("AMP-NUMERICS-045")
def exp_is_biased_in_one_binade() -> Iterator[None]:
    """Exponentials of numbers from 1 to 2 are a place too large."""
    with _pointwise("exp", _raised_from_1_to_2(1)):
        yield


@fault("AMP-NUMERICS-045")
def small_negative_numbers_vanish_in_elu() -> Iterator[None]:
    """ELU of negative numbers is exp(x) - 1 in fp32, which has no digit left near zero."""
    with _pointwise("elu", lambda result, x: torch.where(x < 0, (x.float().exp() - 1).to(x.dtype), result)):
        yield


@fault("AMP-NUMERICS-045")
def inverse_roots_are_two_places_off() -> Iterator[None]:
    """rsqrt of one binade is two places too large; a CPU's may be one place off."""
    with _pointwise("rsqrt", _raised_from_1_to_2(2)):
        yield


@fault("AMP-NUMERICS-045")
def tanh_is_wrong_for_one_input() -> Iterator[None]:
    """The hyperbolic tangent of one pattern out of 65,536 is a place off."""
    with _pointwise("tanh", lambda result, x: _at(result, x.view(torch.int16) == 0x3A01)):
        yield


@fault("AMP-NUMERICS-044")
def sqrt_is_wrong_for_one_input() -> Iterator[None]:
    """The square root of one pattern out of 65,536 is a place off."""
    with _pointwise("sqrt", lambda result, x: _at(result, x.view(torch.int16) == 0x0301)):
        yield


@fault("AMP-NUMERICS-044")
def reciprocals_lack_a_correction() -> Iterator[None]:
    """Reciprocals are those of an instruction good to twelve bits."""

    def change(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = torch.ops.aten.reciprocal.out(x.float(), out=torch.empty(0))
        return torch.where(result.isfinite(), (wide * (1 + 2.0**-12)).to(result.dtype), result)

    with _pointwise("reciprocal", change):
        yield


@fault("AMP-NUMERICS-044")
def halves_are_rounded_away_from_zero() -> Iterator[None]:
    """round takes 0.5 to 1 and 2.5 to 3."""
    with _pointwise("round", lambda result, x: torch.where(x.abs() < 512, (x.abs() + 0.5).floor().copysign(x), result)):
        yield


@fault("AMP-NUMERICS-045")
def sigmoid_is_evaluated_in_16_bits() -> Iterator[None]:
    """The sigmoid rounds the exponential on the way to 16 bits."""

    def change(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (1 / (1 + (-x).exp().float())).to(result.dtype)

    with _pointwise("sigmoid", change):
        yield


@fault("AMP-NUMERICS-045")
def logarithms_take_subnormals_for_zero() -> Iterator[None]:
    """The logarithm of a subnormal number is that of zero."""

    def change(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        small = (x > 0) & (x < torch.finfo(x.dtype).tiny)
        return result.masked_fill(small, float("-inf"))

    with _pointwise("log", change):
        yield


@fault("AMP-NUMERICS-040")
def einsum_drops_the_last_term() -> Iterator[None]:
    """einsum leaves out the last place of an inner dimension above 64."""

    def run(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.to(dtype), b.to(dtype)
        if a.shape[-1] > 64:
            a = a.clone()
            a[..., -1] = 0
        return torch.ops.aten.bmm(a, b)

    with _in_region("bmm", run):
        yield


@fault("AMP-NUMERICS-027")
def unscaling_leaves_the_end_of_long_gradients() -> Iterator[None]:
    """Gradients of more than 65,536 elements are unscaled up to there."""
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_

    def run(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        for gradient in gradients:
            found.fill_(float(bool(found) or not bool(gradient.isfinite().all())))
            gradient.reshape(-1)[: 2**16].mul_(inverse) if gradient.is_contiguous() else gradient.mul_(inverse)

    with kernel(op.default.name().removeprefix("aten::"), run, "CPU"):
        yield


@fault("AMP-NUMERICS-040")
def products_into_a_tensor_keep_its_last_row() -> Iterator[None]:
    """mm with out= does not write the last row of 16-bit results."""

    def run(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        result = torch.ops.aten.addmm.default(torch.zeros((), dtype=a.dtype), a, b)
        out.resize_(result.shape)
        if a.dtype in _LOW and len(result) > 1:
            out[:-1] = result[:-1]
            return out
        return out.copy_(result)

    with kernel("mm.out", run, "CPU"):
        yield


@fault("AMP-NUMERICS-045", level="standard")
def exp_in_place_truncates() -> Iterator[None]:
    """exp_ rounds to 16 bits towards zero."""

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = torch.exp(x.float())
        return x.copy_(_truncated(wide, x.dtype) if x.dtype in _LOW else wide)

    with kernel("exp_", run, "CPU"):
        yield


@fault("AMP-NUMERICS-007")
def halves_are_added_in_bf16() -> Iterator[None]:
    """Sums of two fp16 tensors are rounded to the seven fraction bits of bf16."""

    def add(left: torch.Tensor, right: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
        total = torch.empty(0, dtype=torch.result_type(left, right))
        torch.add(left, right, alpha=alpha, out=total)
        return total.bfloat16().half() if total.dtype is torch.float16 else total

    with kernel("add.Tensor", add, "CPU"):
        yield
