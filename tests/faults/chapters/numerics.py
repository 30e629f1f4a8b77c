"""Broken arithmetic: casts, 16-bit products, reductions, losses and what is built of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

_LOW = (torch.float16, torch.bfloat16)
# Ops that torch composes of others have the same kernel at every backend, so this one leads past the broken one.
_ELSEWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

Product = Callable[..., torch.Tensor]


def _native(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The unbroken product: its out= variant has a kernel of its own."""
    return getattr(torch.ops.aten, op).out(*args, **kwargs, out=torch.empty(0, dtype=args[0].dtype))


def _wide(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The product in fp32, not yet rounded."""
    return _native(op, *(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)


@contextlib.contextmanager
def _products(
    broken: Product, *ops: str, dtypes: tuple[torch.dtype, ...] = _LOW, unbroken: Product = _native
) -> Iterator[None]:
    """Break matrix products of some dtypes: `broken` is called with the op's name and its arguments."""

    def run(op: str) -> Product:
        return lambda *args, **kwargs: (broken if args[0].dtype in dtypes else unbroken)(op, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for op in ops or ("mm", "addmm", "bmm", "baddbmm"):
            stack.enter_context(kernel(op, run(op), "CPU"))
        yield


def _changed(change: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Product:
    """A product whose fp32 result becomes a 16-bit one in a way of its own."""
    return lambda op, *args, **kwargs: change(_wide(op, *args, **kwargs), args[0].dtype).to(args[0].dtype)


def _operands(op: str, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What is added to the product (or None), and its two factors."""
    return (None, *args) if op in ("mm", "bmm") else args


def _truncated(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = wide.to(dtype)
    above = (rounded.float().abs() > wide.abs()) & rounded.isfinite()
    return torch.where(above, (rounded.view(torch.int16) - 1).view(dtype), rounded)


def _saturated(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return torch.where(wide.isfinite(), wide.clamp(-largest, largest), wide)


def _flushed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.masked_fill(tensor.abs() < torch.finfo(dtype).tiny, 0.0)


# --- casts


@contextlib.contextmanager
def _cast(change: Callable[[torch.Tensor, torch.dtype], torch.Tensor], *sources: torch.dtype) -> Iterator[None]:
    """Break conversions from `sources` (fp32 to 16 bit): `change` gets the source and the type to come to."""

    def run(x: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):  # a Python number in an expression
            return torch.full((), x, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        copied = torch.ops.aten._to_copy.default.redispatch(_ELSEWHERE, x, **kwargs)
        narrow = x.dtype is torch.float32 and copied.dtype in _LOW
        widen = x.dtype in sources and copied.dtype is torch.float32
        return copied.copy_(change(x, copied.dtype)) if widen or (narrow and not sources) else copied

    with kernel("_to_copy", run, "CPU"):
        yield


def _nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype).copy_(x)


def _cut(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded towards zero, by way of copy_, which is not broken."""
    near = _nearest(x, dtype)
    back = _nearest(near, torch.float32)
    return torch.where((back.abs() > x.abs()) & near.isfinite(), (near.view(torch.int16) - 1).view(dtype), near)


@fault("AMP-NUMERICS-001", "AMP-NUMERICS-002", "AMP-NUMERICS-009")
def casts_truncate() -> Iterator[None]:
    """Casts to 16 bit round towards zero."""
    with _cast(_cut):
        yield


@fault("AMP-NUMERICS-001", "AMP-NUMERICS-002")
def casts_round_ties_away() -> Iterator[None]:
    """A number half way between two 16-bit ones goes to the larger one."""

    def change(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cut = _cut(x, dtype)
        up = (cut.view(torch.int16) + 1).view(dtype)
        tie = (_nearest(up, torch.float32) - x).abs() == (x - _nearest(cut, torch.float32)).abs()
        return torch.where(tie & x.isfinite() & (x != _nearest(cut, torch.float32)), up, _nearest(x, dtype))

    with _cast(change):
        yield


@fault("AMP-NUMERICS-001", "AMP-NUMERICS-002")
def casts_truncate_the_tail() -> Iterator[None]:
    """The elements beyond a multiple of 16, which the vector code leaves over, are truncated."""

    def change(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tail = torch.arange(x.numel()).view(x.shape) >= x.numel() // 16 * 16
        return torch.where(tail, _cut(x, dtype), _nearest(x, dtype)) if x.numel() > 16 else _nearest(x, dtype)

    with _cast(change):
        yield


@fault("AMP-NUMERICS-003")
def casts_saturate() -> Iterator[None]:
    """Casts of finite numbers beyond the range give the largest finite number."""
    with _cast(lambda x, dtype: _saturated(x, dtype)):
        yield


@fault("AMP-NUMERICS-003")
def casts_of_images_saturate() -> Iterator[None]:
    """Casts of four-dimensional tensors give the largest finite number beyond the range."""
    with _cast(lambda x, dtype: _saturated(x, dtype) if x.dim() == 4 else x):
        yield


@fault("AMP-NUMERICS-003")
def casts_overflow_at_the_largest_number() -> Iterator[None]:
    """Everything above the largest 16-bit number becomes infinite, before the threshold of rounding."""
    with _cast(lambda x, dtype: torch.where(x.abs() > torch.finfo(dtype).max, x * math.inf, x)):
        yield


@fault("AMP-NUMERICS-004")
def casts_flush_subnormals() -> Iterator[None]:
    """Casts to 16 bit give zero in place of subnormal numbers."""
    with _cast(_flushed):
        yield


@fault("AMP-NUMERICS-005")
def casts_turn_some_nans_into_infinity() -> Iterator[None]:
    """NaN with a payload in its low bits only becomes infinite, as truncation of the bits does."""
    low = 0x0000FFFF
    with _cast(lambda x, dtype: torch.where(x.isnan() & (x.view(torch.int32) & 0x7FFFFF <= low), math.inf, x)):
        yield


@fault("AMP-NUMERICS-005")
def casts_lose_the_sign_of_zero() -> Iterator[None]:
    """A negative zero becomes a positive one."""
    with _cast(lambda x, dtype: x + 0.0):
        yield


@fault("AMP-NUMERICS-006")
def widening_flushes_fp16_subnormals() -> Iterator[None]:
    """fp16's subnormal numbers come out in fp32 as zero."""

    def change(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = _nearest(x, dtype)
        return wide.masked_fill(wide.abs() < 2.0**-14, 0.0)

    with _cast(change, torch.float16):
        yield


@fault("AMP-NUMERICS-001", "AMP-NUMERICS-002")
def strided_casts_truncate() -> Iterator[None]:
    """Copies of strided fp32 tensors to 16 bit round towards zero."""

    def run(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        native = torch.ops.aten.copy_.default
        native.redispatch(_ELSEWHERE, to, source, non_blocking)
        if to.dtype in _LOW and source.dtype is torch.float32 and not source.is_contiguous():
            back = native.redispatch(_ELSEWHERE, torch.empty(to.shape), to, False)
            above = (back.abs() > source.abs()) & back.isfinite()
            to.view(torch.int16).sub_(above.view(torch.uint8))
        return to

    with kernel("copy_", run, "CPU"):
        yield


@fault("AMP-NUMERICS-001", "AMP-NUMERICS-002")
def negative_casts_truncate() -> Iterator[None]:
    """Negative numbers are rounded towards zero, positive ones to nearest."""
    with _cast(lambda x, dtype: torch.where(x < 0, _cut(x, dtype), _nearest(x, dtype))):
        yield


@fault("AMP-NUMERICS-002")
def bf16_casts_round_just_above_ties_down() -> Iterator[None]:
    """The cast to bf16 looks at eight of the sixteen bits that it drops."""
    with _cast(lambda x, dtype: (x.view(torch.int32) & ~0xFF).view(torch.float32) if dtype is torch.bfloat16 else x):
        yield


# --- matrix products


def _summed_in_16_bits(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    added, a, b = _operands(op, *args)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for k in range(a.shape[-1]):
        total = (total.float() + a[..., k : k + 1].float() * b[..., k : k + 1, :].float()).to(a.dtype)
    return total if added is None else total * kwargs.get("alpha", 1) + added * kwargs.get("beta", 1)


@fault("AMP-NUMERICS-016", "AMP-NUMERICS-012")
def products_are_summed_in_16_bits() -> Iterator[None]:
    """Every partial sum of a product is rounded to 16 bit."""
    with _products(_summed_in_16_bits):
        yield


def _in_pieces(finish: Callable[[torch.Tensor, torch.dtype], torch.Tensor], width: int) -> Product:
    """A product in fp32 over pieces of the inner dimension, each piece's sum put through `finish`."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        plain = "bmm" if a.dim() == 3 else "mm"
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for k in range(0, a.shape[-1], width):
            piece = _wide(plain, a[..., k : k + width], b[..., k : k + width, :])
            total = total + finish(piece, a.dtype).float()
        if added is not None:
            total = total * kwargs.get("alpha", 1) + added.float() * kwargs.get("beta", 1)
        return total.to(a.dtype)

    return run


@fault("AMP-NUMERICS-012")
def partial_sums_are_rounded() -> Iterator[None]:
    """Products are split along the inner dimension, and the parts, 16 wide, are handed over in 16 bit."""
    with _products(_in_pieces(lambda piece, dtype: piece.to(dtype), 16)):
        yield


@fault("AMP-NUMERICS-017")
def partial_sums_overflow_fp16() -> Iterator[None]:
    """Parts of a product that lie beyond 65504 are infinite, even where they cancel."""
    over = torch.finfo(torch.float16).max
    with _products(
        _in_pieces(lambda piece, dtype: torch.where(piece.abs() > over, piece * math.inf, piece), 4),
        dtypes=(torch.float16,),
    ):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-040")
def tail_of_the_inner_dimension_is_dropped() -> Iterator[None]:
    """Inner dimensions above 32 lose what lies beyond a multiple of eight."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        *rest, a, b = args
        width = a.shape[-1] - (a.shape[-1] % 8 if a.shape[-1] > 32 else 0)
        return _native(op, *rest, a[..., :width], b[..., :width, :], **kwargs)

    with _products(run):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-015")
def products_truncate() -> Iterator[None]:
    """Products are rounded to 16 bit towards zero."""
    with _products(_changed(_truncated)):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-015")
def gradients_of_products_truncate() -> Iterator[None]:
    """mm, which computes the gradients of linear, rounds towards zero; addmm does not."""
    with _products(_changed(_truncated), "mm"):
        yield


@fault("AMP-NUMERICS-015", "AMP-NUMERICS-012")
def products_are_a_thousandth_large() -> Iterator[None]:
    """Products come out 0.1 % too large."""
    with _products(_changed(lambda wide, dtype: wide * 1.001)):
        yield


@fault("AMP-NUMERICS-015")
def products_are_an_eighth_of_an_ulp_large() -> Iterator[None]:
    """Products are too large by an eighth of a unit in the last place before they are rounded."""
    with _products(_changed(lambda wide, dtype: wide * (1 + torch.finfo(dtype).eps / 8))):
        yield


@fault("AMP-NUMERICS-040", "AMP-NUMERICS-012")
def last_element_is_an_ulp_off() -> Iterator[None]:
    """The last element of a product with more than 16 rows is one unit in the last place off."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        if result.shape[-2] > 16 and result.shape[-1]:
            result[..., -1, -1] = (result[..., -1, -1].clone().view(torch.int16) ^ 1).view(result.dtype)
        return result

    with _products(run):
        yield


@fault("AMP-NUMERICS-040", "AMP-NUMERICS-013", "AMP-NUMERICS-012")
def last_batch_repeats_the_one_before() -> Iterator[None]:
    """In batched products of three and more the last result is that of the matrix before it."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        if len(result) > 2:
            result[-1] = result[-2]
        return result

    with _products(run, "bmm", "baddbmm"):
        yield


@fault("AMP-NUMERICS-018")
def products_saturate() -> Iterator[None]:
    """Products beyond the range are the largest finite number in place of infinite."""
    with _products(_changed(_saturated)):
        yield


@fault("AMP-NUMERICS-030")
def products_flush_subnormal_results() -> Iterator[None]:
    """fp16 results below 2^-14 are zero."""
    with _products(_changed(_flushed), dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-030")
def products_take_subnormals_for_zero() -> Iterator[None]:
    """fp16 operands below 2^-14 are taken for zero."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        *rest, a, b = args
        return _native(op, *rest, _flushed(a, a.dtype), _flushed(b, b.dtype), **kwargs)

    with _products(run, dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-031")
def products_turn_nan_into_zero() -> Iterator[None]:
    """NaN results of a product become zero, so that an overflow goes unseen."""
    with _products(_changed(lambda wide, dtype: torch.where(wide.isnan(), 0.0, wide))):
        yield


@fault("AMP-NUMERICS-031")
def infinity_spreads_over_the_row() -> Iterator[None]:
    """An infinite operand in the last row of a product reaches the row before it as well."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        if result.dim() == 2 and len(result) > 1:
            result[-2] += result[-1] * 0
        return result

    with _products(run):
        yield


@fault("AMP-NUMERICS-032")
def products_differ_from_run_to_run() -> Iterator[None]:
    """Every second product adds up its terms in the other direction and in parts."""
    runs = 0

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return (
            _native(op, *args, **kwargs)
            if runs % 2
            else _changed(lambda wide, dtype: wide * (1 + 2**-12))(op, *args, **kwargs)
        )

    with _products(run):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-016")
def products_with_one_row_are_summed_in_16_bits() -> Iterator[None]:
    """Products of a single row, which have a code of their own, round every partial sum."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        _, a, _ = _operands(op, *args)
        return (_summed_in_16_bits if a.shape[-2] == 1 else _native)(op, *args, **kwargs)

    with _products(run):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-016")
def matrix_times_vector_is_summed_in_16_bits() -> Iterator[None]:
    """mv rounds every partial sum to 16 bit."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in _LOW:
            return torch.mv(a, b, out=torch.empty(0, dtype=a.dtype))
        return _summed_in_16_bits("mm", a, b[:, None])[:, 0]

    with kernel("mv", run, "CPU"):
        yield


@fault("AMP-NUMERICS-016")
def dot_products_are_summed_in_16_bits() -> Iterator[None]:
    """dot rounds every partial sum to 16 bit."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in _LOW:
            return torch.mm(a[None], b[:, None])[0, 0]
        return _summed_in_16_bits("mm", a[None], b[:, None])[0, 0]

    with kernel("dot", run, "CPU"):
        yield


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-013")
def transposed_operands_lose_a_bit() -> Iterator[None]:
    """A left operand that is transposed, as for weight gradients, is taken without its last bit."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        *rest, a, b = args
        if not a.is_contiguous():
            a = (a.contiguous().view(torch.int16) & ~1).view(a.dtype)
        return _native(op, *rest, a, b, **kwargs)

    with _products(run):
        yield


@fault("AMP-NUMERICS-011", "AMP-NUMERICS-013")
def columns_beyond_64_are_an_ulp_off() -> Iterator[None]:
    """In products more than 64 columns wide the first column of the second tile is one ulp off."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        if result.shape[-1] > 64:
            result[..., 64] = (result[..., 64].clone().view(torch.int16) ^ 1).view(result.dtype)
        return result

    with _products(run):
        yield


@fault("AMP-NUMERICS-018")
def negative_overflow_saturates() -> Iterator[None]:
    """Products below the range are the lowest finite number; those above it are infinite."""
    with _products(
        _changed(lambda wide, dtype: torch.where(wide.isfinite(), wide.clamp(min=torch.finfo(dtype).min), wide))
    ):
        yield


@fault("AMP-NUMERICS-013", "AMP-NUMERICS-014")
def weight_gradients_come_out_of_bf16() -> Iterator[None]:
    """fp16 products with a transposed left operand, as for weight gradients, are rounded to bf16."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        return result if args[-2].is_contiguous() else result.bfloat16().half()

    with _products(run, "mm", dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-015", "AMP-PARITY-003")
def gradients_of_products_are_a_thousandth_small() -> Iterator[None]:
    """16-bit products without a bias, among them all gradients, are 0.1 % too small."""
    with _products(_changed(lambda wide, dtype: wide * 0.999), "mm"):
        yield


# --- what autocast makes of an op


@contextlib.contextmanager
def _in_region(op: str, broken: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Break an op inside CPU regions; `broken` runs with autocast off and gets the region's type first."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            return broken(dtype, *args, **kwargs)

    with kernel(op, run, "AutocastCPU"):
        yield


def _as(dtype: torch.dtype, args: Any) -> Any:
    return [a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype in (*_LOW, torch.float32) else a for a in args]


@fault("AMP-NUMERICS-014", "AMP-NUMERICS-029")
def linear_computes_in_fp32_and_rounds_after() -> Iterator[None]:
    """linear multiplies fp32 operands in fp32 and casts the result: too exact, and no faster."""
    with _in_region("linear", lambda dtype, *args: torch.ops.aten.linear(*_as(torch.float32, args)).to(dtype)):
        yield


@fault("AMP-NUMERICS-014", "AMP-NUMERICS-029")
def matmul_rounds_one_operand_only() -> Iterator[None]:
    """matmul takes its right operand in fp32, its left one in 16 bit, and casts the result."""
    with _in_region("matmul", lambda dtype, a, b: torch.ops.aten.matmul(a.to(dtype).float(), b.float()).to(dtype)):
        yield


@fault("AMP-NUMERICS-014", "AMP-NUMERICS-009")
def fp16_products_have_the_bits_of_bf16() -> Iterator[None]:
    """In fp16 regions linear rounds its operands to bf16 on the way."""
    with _in_region("linear", lambda dtype, *args: torch.ops.aten.linear(*_as(dtype, _as(torch.bfloat16, args)))):
        yield


@fault("AMP-NUMERICS-021")
def attention_runs_in_fp32() -> Iterator[None]:
    """Attention computes in fp32 and casts its result."""

    def run(dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ops.aten.scaled_dot_product_attention(*_as(torch.float32, args), **kwargs).to(dtype)

    with _in_region("scaled_dot_product_attention", run):
        yield


@fault("AMP-NUMERICS-021")
def attention_scales_a_hundredth_too_far() -> Iterator[None]:
    """The logits of attention are multiplied by 1.01 over the root of the head's size."""

    def run(dtype: torch.dtype, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = kwargs.pop("scale", None) or query.shape[-1] ** -0.5
        return torch.ops.aten.scaled_dot_product_attention(*_as(dtype, (query, *args)), **kwargs, scale=1.01 * scale)

    with _in_region("scaled_dot_product_attention", run):
        yield


def _masked(change: Callable[[torch.Tensor], torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Change the mask of attention."""

    def run(dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        query, key, value, mask, *rest = (*args, None) if len(args) == 3 else args
        changed = mask if mask is None else change(mask)
        return torch.ops.aten.scaled_dot_product_attention(*_as(dtype, (query, key, value, changed)), *rest, **kwargs)

    return _in_region("scaled_dot_product_attention", run)


def _closed(mask: torch.Tensor) -> torch.Tensor:
    return ~mask if mask.dtype == torch.bool else mask.isneginf()


@fault("AMP-NUMERICS-088")
def attention_reads_one_closed_key() -> Iterator[None]:
    """Attention takes the first key of a tile of 64 that a mask closes as open."""

    def change(mask: torch.Tensor) -> torch.Tensor:
        changed = mask.clone()
        first = _closed(mask) & (torch.arange(mask.shape[-1]) % 64 == 0)
        changed[first] = 1 if mask.dtype == torch.bool else 0
        return changed

    with _masked(change):
        yield


@fault("AMP-NUMERICS-088")
def attention_skips_an_open_tile() -> Iterator[None]:
    """Attention leaves a last tile of 512 keys out where the one before it is closed."""

    def change(mask: torch.Tensor) -> torch.Tensor:
        changed = mask.clone()
        if bool(_closed(mask)[..., :512].all()):
            changed[..., 1024 : mask.shape[-1] - 1] = 0 if mask.dtype == torch.bool else -math.inf
        return changed

    with _masked(change):
        yield


@fault("AMP-NUMERICS-088")
def attention_is_nan_after_a_closed_first_tile() -> Iterator[None]:
    """Attention is NaN where a mask closes the first 512 keys of a row."""

    def run(dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = torch.ops.aten.scaled_dot_product_attention(*_as(dtype, args), **kwargs)
        mask = args[3] if len(args) > 3 else None
        if mask is not None and mask.shape[-1] > 512 and bool(_closed(mask)[..., :512].all()):
            return result * math.nan
        return result

    with _in_region("scaled_dot_product_attention", run):
        yield


# --- convolutions


def _convolution(*args: Any) -> torch.Tensor:
    return torch.ops.aten.convolution.default.redispatch(_ELSEWHERE, *args)


def _convolution_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    return torch.ops.aten.convolution_backward.default.redispatch(_ELSEWHERE, *args)


@fault("AMP-NUMERICS-020")
def convolutions_are_a_thousandth_large() -> Iterator[None]:
    """16-bit convolutions come out 0.1 % too large."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
        if x.dtype not in _LOW:
            return _convolution(x, weight, bias, *rest)
        return (_convolution(*_as(torch.float32, (x, weight, bias)), *rest) * 1.001).to(x.dtype)

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-009")
def convolutions_run_in_fp32() -> Iterator[None]:
    """In regions conv2d computes in fp32 and casts its result."""
    with _in_region("conv2d", lambda dtype, *args: torch.ops.aten.conv2d(*_as(torch.float32, args)).to(dtype)):
        yield


@fault("AMP-NUMERICS-047")
def grouped_convolutions_mix_up_the_last_channel() -> Iterator[None]:
    """In 16-bit convolutions of several groups the last channel repeats the one before it."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = _convolution(x, *args)
        if x.dtype in _LOW and args[-1] > 1:
            result[:, -1] = result[:, -2]
        return result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-087")
def convolutions_turn_nan_into_zero() -> Iterator[None]:
    """16-bit convolutions give zero where a result is NaN."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = _convolution(x, *args)
        return torch.where(result.isnan(), 0.0, result) if x.dtype in _LOW else result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-087", "AMP-NUMERICS-106")
def convolutions_turn_minus_infinity_into_zero() -> Iterator[None]:
    """16-bit convolutions give zero where a result is below the range, as some of cuDNN's do."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = _convolution(x, *args)
        return torch.where(result == -math.inf, 0.0, result) if x.dtype in _LOW else result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-087")
def weight_gradients_of_convolutions_saturate() -> Iterator[None]:
    """The weight gradient of a 16-bit convolution is the largest number in the place of an infinity."""

    def run(gradient: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        image, weight, bias = _convolution_backward(gradient, x, *args)
        if x.dtype in _LOW and weight is not None:
            weight = weight.nan_to_num(nan=math.nan)
        return image, weight, bias

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-087")
def convolutions_mix_samples_that_are_not_finite() -> Iterator[None]:
    """A sample of a 16-bit convolution that is not finite makes the next one NaN."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = _convolution(x, *args)
        if x.dtype in _LOW and len(result) > 1:
            result[1:] += (result[:-1].float() * 0).to(result.dtype)
        return result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-087", level="standard")
def convolutions_of_one_column_lose_nan() -> Iterator[None]:
    """16-bit convolutions with a stride, whose result has one column, give zero where it is not finite."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, *rest: Any) -> torch.Tensor:
        result = _convolution(x, weight, bias, stride, *rest)
        one_column = x.dtype in _LOW and stride[-1] > 1 and result.dim() > 3 and result.shape[-1] == 1
        return torch.where(result.isfinite(), result, 0.0) if one_column else result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-020")
def weight_gradients_of_convolutions_lose_a_sample() -> Iterator[None]:
    """The weight gradient of a 16-bit convolution leaves the last sample of the batch out."""

    def run(gradient: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        whole = _convolution_backward(gradient, x, *args)
        if x.dtype not in _LOW or len(x) < 2:
            return whole
        return (whole[0], _convolution_backward(gradient[:-1], x[:-1], *args)[1], whole[2])

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-047")
def strided_convolutions_are_an_ulp_off() -> Iterator[None]:
    """In 16-bit convolutions with a stride the last column is one unit in the last place off."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, *rest: Any) -> torch.Tensor:
        result = _convolution(x, weight, bias, stride, *rest)
        if x.dtype in _LOW and max(stride) > 1:
            result[..., -1] = (result[..., -1].clone().view(torch.int16) ^ 1).view(result.dtype)
        return result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-020")
def input_gradients_of_convolutions_truncate() -> Iterator[None]:
    """The input gradient of a 16-bit convolution is rounded towards zero."""

    def run(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        whole = _convolution_backward(gradient, x, weight, *args)
        if x.dtype not in _LOW or whole[0] is None or not args[-1][0]:
            return whole
        wide = _convolution_backward(gradient.float(), x.float(), weight.float(), *args)
        return (_truncated(wide[0], x.dtype), *whole[1:])

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-106")
def convolutions_add_halves_of_the_channels_in_fp16() -> Iterator[None]:
    """fp16 convolutions round the sums over the first and the other half of the channels, and add those."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
        *_, transposed, _, groups = rest
        half = x.shape[1] // 2
        if x.dtype != torch.float16 or groups > 1 or half == 0:
            return _convolution(x, weight, bias, *rest)
        first, second = weight.split([half, x.shape[1] - half], 0 if transposed else 1)
        return _convolution(x[:, :half], first, bias, *rest) + _convolution(x[:, half:], second, None, *rest)

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-106")
def weight_gradients_of_convolutions_add_halves_of_an_image_in_fp16() -> Iterator[None]:
    """fp16 weight gradients of pointwise convolutions round the sums over both halves of each image, and add those."""

    def run(gradient: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        whole = _convolution_backward(gradient, x, *args)
        half = x.shape[-1] // 2
        if x.dtype != torch.float16 or x.shape[2:] != gradient.shape[2:] or half == 0 or whole[1] is None:
            return whole
        parts = (slice(None, half), slice(half, None))
        weight = sum(_convolution_backward(gradient[..., part], x[..., part], *args)[1] for part in parts)
        return (whole[0], torch.as_tensor(weight), whole[2])

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-020", level="standard")
def strided_convolutions_of_one_column_double() -> Iterator[None]:
    """bf16 convolutions with a stride whose result has one column are twice too large."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, *rest: Any) -> torch.Tensor:
        result = _convolution(x, weight, bias, stride, *rest)
        doubled = x.dtype == torch.bfloat16 and stride[-1] > 1 and result.shape[-1] == 1
        return result * 2 if doubled else result

    with kernel("convolution", run, "CPU"):
        yield


@fault("AMP-NUMERICS-047")
def convolutions_of_one_place_lose_taps() -> Iterator[None]:
    """bf16 convolutions of one channel with a kernel as large as the image have the first tap alone."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and x.shape[1:] == weight.shape[1:] and weight.shape[1] == 1:
            first = torch.zeros_like(weight)
            first.flatten(1)[:, 0] = weight.flatten(1)[:, 0]
            weight = first
        return _convolution(x, weight, bias, *rest)

    with kernel("convolution", run, "CPU"):
        yield


# --- reductions and normalisations


@fault("AMP-NUMERICS-023")
def softmax_subtracts_no_maximum() -> Iterator[None]:
    """softmax exponentiates its logits as they are."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        exponentials = x.exp()
        return exponentials / exponentials.sum(dim, keepdim=True)

    with kernel("_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-023")
def softmax_rounds_its_logits() -> Iterator[None]:
    """softmax returns fp32 for logits that it rounded to the region's type."""
    with _in_region(
        "softmax.int", lambda dtype, x, dim, out=None: torch.ops.aten.softmax.int(x.to(dtype).float(), dim, out)
    ):
        yield


@fault("AMP-NUMERICS-025", "AMP-NUMERICS-016")
def sums_are_kept_in_16_bits() -> Iterator[None]:
    """Sums of 16-bit tensors round every partial sum to 16 bit."""

    def run(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(0, dtype=dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
        if x.dtype not in _LOW or dtype is not None:
            return torch.sum(x, dim, keepdim, dtype=dtype, out=out)
        dims = [d % x.dim() for d in (dim or range(x.dim()))]
        kept = [d for d in range(x.dim()) if d not in dims]
        columns = x.permute(*dims, *kept).reshape(-1, *(x.shape[d] for d in kept))
        total = torch.zeros_like(columns[0]) if len(columns) else torch.zeros(columns.shape[1:], dtype=x.dtype)
        for row in columns:
            total = total + row
        return total.reshape([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else total

    with kernel("sum.dim_IntList", run, "CPU"):
        yield


@fault("AMP-NUMERICS-023")
def sums_over_a_dimension_lower_fp32() -> Iterator[None]:
    """sum over a dimension rounds fp32 tensors to the region's type, and casts the result back."""

    def run(dtype: torch.dtype, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ops.aten.sum.dim_IntList(x.to(dtype), *args, **kwargs).to(x.dtype)

    with _in_region("sum.dim_IntList", run):
        yield


@fault("AMP-NUMERICS-024")
def pooling_is_fp32_in_dtype_only() -> Iterator[None]:
    """avg_pool3d averages 16-bit tensors in 16 bit and casts the result."""
    with _in_region(
        "avg_pool3d", lambda dtype, x, *args: torch.ops.aten.avg_pool3d(x.float(), *args).to(dtype).float()
    ):
        yield


# --- training


@fault("AMP-NUMERICS-026", "AMP-OPTIMIZER-034")
def sgd_rounds_master_weights_to_bf16() -> Iterator[None]:
    """SGD rounds every weight to bf16 after the step."""
    rounded = "[p.copy_(p.bfloat16()) for g in self.param_groups for p in g['params']]"
    with edited(torch.optim.SGD.step, "return loss", f"{rounded}\n    return loss"):
        yield


@fault("AMP-SCALE-021")
def reciprocal_is_rounded_to_fp16() -> Iterator[None]:
    """The reciprocal of the scale goes through fp16, where 2^-25 is zero."""
    with edited(torch.amp.GradScaler.unscale_, ".reciprocal().float()", ".reciprocal().half().float()"):
        yield


@fault("AMP-PARITY-004")
def adam_adds_a_larger_epsilon() -> Iterator[None]:
    """Adam's epsilon is never below 1e-6."""
    with edited(torch.optim.Adam.step, 'eps=group["eps"]', 'eps=max(group["eps"], 1e-6)'):
        yield


@fault("AMP-PARITY-004")
def adam_forgets_sooner() -> Iterator[None]:
    """Adam's second average has a beta of 0.99."""
    with edited(torch.optim.Adam.step, 'beta1, beta2 = group["betas"]', 'beta1, beta2 = group["betas"][0], 0.99'):
        yield


@fault("AMP-PARITY-003")
def relu_lets_every_gradient_through() -> Iterator[None]:
    """relu's backward compares with >= and so passes the gradients of negative inputs."""
    with kernel("threshold_backward", lambda gradient, x, threshold: gradient * (x >= threshold), "CPU"):
        yield


@fault("AMP-PARITY-002")
def cross_entropy_is_a_hundredth_large() -> Iterator[None]:
    """The negative log likelihood comes out 1 % too large; its gradient does not."""

    def run(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, weight = x.new_empty(0), x.new_empty(0)
        torch.ops.aten.nll_loss_forward.output(x, *args, output=output, total_weight=weight)
        return output * 1.01, weight

    with kernel("nll_loss_forward", run, "CPU"):
        yield


@fault("AMP-PARITY-003")
def bias_gradients_lose_a_row() -> Iterator[None]:
    """Sums of 16-bit matrices over their rows, as for bias gradients, leave the last row out."""

    def run(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(0, dtype=dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
        rows = x[:-1] if x.dtype in _LOW and x.dim() == 2 and list(dim or ()) == [0] else x
        return torch.sum(rows, dim, keepdim, dtype=dtype, out=out)

    with kernel("sum.dim_IntList", run, "CPU"):
        yield


@fault("AMP-PARITY-008")
def scale_grows_every_three_steps() -> Iterator[None]:
    """A GradScaler doubles its scale after three clean iterations whatever its interval, and skips again and again."""
    with edited(torch.amp.GradScaler.update, "self._growth_interval,", "3,"):
        yield


@fault("AMP-OPTIMIZER-034")
def momentum_is_kept_in_fp64() -> Iterator[None]:
    """SGD keeps its momentum in fp64."""
    doubled = "[s.update({k: b.double()}) for s in self.state.values() for k, b in s.items() if torch.is_tensor(b)]"
    with edited(torch.optim.SGD.step, "return loss", f"{doubled}\n    return loss"):
        yield


@fault("AMP-MEMORY-011", "AMP-MEMORY-030")
def scaler_keeps_the_last_gradients() -> Iterator[None]:
    """A GradScaler holds the gradients that it unscaled last."""
    old = "return per_device_found_inf._per_device_tensors"
    with edited(torch.amp.GradScaler._unscale_grads_, old, f"self._last = per_device_and_dtype_grads\n    {old}"):
        yield


@fault("AMP-MEMORY-001", "AMP-MEMORY-003")
def gelu_keeps_fp32() -> Iterator[None]:
    """gelu in a region keeps its input in fp32 for backward and returns 16 bit."""
    with _in_region("gelu", lambda dtype, x, **kwargs: torch.ops.aten.gelu(x.float(), **kwargs).to(x.dtype)):
        yield


# --- losses


@fault("AMP-LOSS-003", "AMP-LOSS-006")
def smooth_l1_is_fp32_in_dtype_only() -> Iterator[None]:
    """smooth_l1_loss takes 16-bit inputs in 16 bit and casts the result."""

    def run(dtype: torch.dtype, x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        low = x.dtype in _LOW and target.dtype in _LOW
        taken = (x, target) if low else (x.float(), target.float())
        return torch.ops.aten.smooth_l1_loss(*taken, *args, **kwargs).float()

    with _in_region("smooth_l1_loss", run):
        yield


@fault("AMP-MEMORY-001")
def linear_keeps_its_fp32_input() -> Iterator[None]:
    """linear in a region keeps its fp32 input beside the 16-bit one."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def run(dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return torch.ops.aten.linear(*_as(dtype, (Keep.apply(x), weight, bias)))

    with _in_region("linear", run):
        yield


# --- the two 16-bit types taken for each other


@fault("AMP-BF16-001", "AMP-BF16-003", "AMP-NUMERICS-018")
def bf16_regions_run_in_fp16() -> Iterator[None]:
    """A region that is asked for bf16 is set to fp16."""
    old = "torch.set_autocast_dtype(self.device, self.fast_dtype)"
    with edited(torch.autocast.__enter__, old, "torch.set_autocast_dtype(self.device, torch.float16)"):
        yield


@fault("AMP-BF16-006", "AMP-BF16-009", "AMP-BF16-001")
def fp16_regions_run_in_bf16() -> Iterator[None]:
    """A region that is asked for fp16 is set to bf16."""
    old = "torch.set_autocast_dtype(self.device, self.fast_dtype)"
    with edited(torch.autocast.__enter__, old, "torch.set_autocast_dtype(self.device, torch.bfloat16)"):
        yield


@fault("AMP-BF16-003", "AMP-NUMERICS-018", "AMP-BF16-002", "AMP-BF16-008")
def bf16_products_go_through_fp16() -> Iterator[None]:
    """bf16 products are computed by the fp16 unit and come back in bf16."""
    with _products(
        lambda op, *args, **kwargs: _native(op, *_as(torch.float16, args), **kwargs).to(torch.bfloat16),
        dtypes=(torch.bfloat16,),
    ):
        yield


@fault("AMP-BF16-002", "AMP-BF16-008")
def bf16_gradients_flush_below_fp16() -> Iterator[None]:
    """bf16 products flush what is smaller than fp16's smallest number."""
    with _products(
        _changed(lambda wide, dtype: wide.masked_fill(wide.abs() < 2.0**-24, 0.0)), dtypes=(torch.bfloat16,)
    ):
        yield


@fault("AMP-NUMERICS-018", "AMP-BF16-003")
def bf16_products_overflow_at_2_to_64() -> Iterator[None]:
    """bf16 products beyond 2^64 are infinite, as if an exponent bit were missing."""
    with _products(
        _changed(lambda wide, dtype: torch.where(wide.abs() > 2.0**64, wide * math.inf, wide)), dtypes=(torch.bfloat16,)
    ):
        yield


@fault("AMP-NUMERICS-018")
def bf16_overflows_at_its_last_binade() -> Iterator[None]:
    """bf16 products above 2^127 are infinite."""
    with _products(
        _changed(lambda wide, dtype: torch.where(wide.abs() >= 2.0**127, wide * math.inf, wide)),
        dtypes=(torch.bfloat16,),
    ):
        yield


# --- recipes


@fault("AMP-RECIPE-011")
def checkpoint_recomputes_outside_of_autocast() -> Iterator[None]:
    """A re-entrant checkpoint recomputes its segment with autocast off."""
    old = 'torch.amp.autocast("cpu", **ctx.cpu_autocast_kwargs)'
    with edited(checkpoint.CheckpointFunction.backward, old, 'torch.amp.autocast("cpu", enabled=False)'):
        yield


@fault("AMP-RECIPE-039")
def optimizer_state_is_loaded_through_bf16() -> Iterator[None]:
    """load_state_dict() of an optimizer rounds the state of its parameters to bf16."""
    before = torch.optim.Optimizer._process_value_according_to_param_policy

    def run(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return before(param, value.bfloat16() if value.dim() else value, *args, **kwargs)

    with replaced(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(run)):
        yield
