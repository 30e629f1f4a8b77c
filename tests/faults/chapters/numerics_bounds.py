"""Broken arithmetic that only a derived bound can see: wrong precision inside, wrong statistics, small factors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel
from tests.faults.chapters.numerics import (
    _as,
    _changed,
    _convolution,
    _convolution_backward,
    _flushed,
    _in_pieces,
    _in_region,
    _native,
    _operands,
    _products,
    _wide,
)

_LOW = (torch.float16, torch.bfloat16)


def _through(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor rounded to `dtype`, in its own type."""
    return tensor.to(dtype).to(tensor.dtype)


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 numbers rounded to the ten fraction bits of TF32, half away from zero."""
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


# --- another precision than promised


@fault("AMP-NUMERICS-012", "AMP-NUMERICS-014")
def fp16_products_run_in_bf16() -> Iterator[None]:
    """fp16 products round their operands to bf16."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        rest = () if added is None else (added,)
        return _native(op, *rest, _through(torch.bfloat16, a), _through(torch.bfloat16, b), **kwargs)

    with _products(run, dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-070")
def fp16_products_run_in_tf32() -> Iterator[None]:
    """In fp16 regions mm, linear and bmm multiply in TF32 and round the result to fp16: same fraction, more range."""

    def run(op: Any) -> Callable[..., torch.Tensor]:
        def broken(dtype: torch.dtype, *args: Any) -> torch.Tensor:
            if dtype is not torch.float16:
                return op(*_as(dtype, args))
            return op(*(_tf32(a) if isinstance(a, torch.Tensor) else a for a in _as(torch.float32, args))).half()

        return broken

    with contextlib.ExitStack() as stack:
        for name in ("mm", "linear", "bmm"):
            stack.enter_context(_in_region(name, run(getattr(torch.ops.aten, name))))
        yield


@fault("AMP-NUMERICS-014", "AMP-NUMERICS-012")
def bf16_products_run_in_fp16() -> Iterator[None]:
    """In bf16 regions linear multiplies fp16 operands and casts the result: eight times too exact."""

    def run(dtype: torch.dtype, *args: Any) -> torch.Tensor:
        return torch.ops.aten.linear(*_as(torch.float16, args)).to(dtype)

    with _in_region("linear", run):
        yield


@fault("AMP-NUMERICS-022")
def fp32_products_run_in_tf32() -> Iterator[None]:
    """fp32 products whose sizes are all multiples of eight round their operands to TF32."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        rest = () if added is None else (added,)
        if all(size % 8 == 0 for size in (*a.shape[-2:], b.shape[-1])):
            a, b = _tf32(a), _tf32(b)
        return _native(op, *rest, a, b, **kwargs)

    with _products(run, dtypes=(torch.float32,)):
        yield


@fault("AMP-NUMERICS-022")
def long_fp32_products_run_in_bf16() -> Iterator[None]:
    """fp32 products of more than 1024 terms round their operands to bf16."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        rest = () if added is None else (added,)
        if a.shape[-1] > 1024:
            a, b = _through(torch.bfloat16, a), _through(torch.bfloat16, b)
        return _native(op, *rest, a, b, **kwargs)

    with _products(run, dtypes=(torch.float32,)):
        yield


@fault("AMP-NUMERICS-020")
def convolutions_compute_in_fp32_and_round() -> Iterator[None]:
    """In regions conv1d, conv2d and conv3d take fp32 operands, and cast the result."""

    def run(op: Any) -> Callable[..., torch.Tensor]:
        return lambda dtype, *args: op(*_as(torch.float32, args)).to(dtype)

    with contextlib.ExitStack() as stack:
        for name in ("conv1d", "conv2d", "conv3d"):
            stack.enter_context(_in_region(name, run(getattr(torch.ops.aten, name))))
        yield


# --- accumulation


@contextlib.contextmanager
def _kept_in_16_bits_every(width: int) -> Iterator[None]:
    """The accumulator of products is rounded to 16 bits after every `width` terms."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        plain = "bmm" if a.dim() == 3 else "mm"
        total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        for k in range(0, a.shape[-1], width):
            total = (total.float() + _wide(plain, a[..., k : k + width], b[..., k : k + width, :])).to(a.dtype)
        return total if added is None else (total.float() + added.float()).to(a.dtype)

    with _products(run):
        yield


@fault("AMP-NUMERICS-012")
def products_keep_16_bits_every_16_terms() -> Iterator[None]:
    """The accumulator is rounded to 16 bits after every 16 terms."""
    with _kept_in_16_bits_every(16):
        yield


@fault("AMP-NUMERICS-012")
def products_keep_16_bits_every_64_terms() -> Iterator[None]:
    """The accumulator is rounded to 16 bits after every 64 terms."""
    with _kept_in_16_bits_every(64):
        yield


@fault("AMP-NUMERICS-012")
def products_keep_16_bits_every_256_terms() -> Iterator[None]:
    """The accumulator is rounded to 16 bits after every 256 terms."""
    with _kept_in_16_bits_every(256):
        yield


@fault("AMP-NUMERICS-012")
def split_k_hands_over_16_bits() -> Iterator[None]:
    """Products of more than 1024 terms are split, and the parts of 1024 are handed over in 16 bits."""
    with _products(_in_pieces(lambda piece, dtype: piece.to(dtype), 1024)):
        yield


@fault("AMP-NUMERICS-012")
def products_accumulate_towards_zero() -> Iterator[None]:
    """The fp32 accumulator keeps 13 fraction bits after every 64 terms, cut off: coarser than any tensor core."""

    def cut(wide: torch.Tensor) -> torch.Tensor:
        return (wide.contiguous().view(torch.int32) & ~0x3FF).view(torch.float32)

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        added, a, b = _operands(op, *args)
        plain = "bmm" if a.dim() == 3 else "mm"
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for k in range(0, a.shape[-1], 64):
            total = cut(total + _wide(plain, a[..., k : k + 64], b[..., k : k + 64, :]))
        return (total if added is None else total + added.float()).to(a.dtype)

    with _products(run):
        yield


@fault("AMP-NUMERICS-013")
def weight_gradients_are_summed_in_16_bits() -> Iterator[None]:
    """Products with a transposed left operand, as for weight gradients, keep 16 bits every 64 terms; others do not."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        *_, a, b = args
        if a.is_contiguous() or op != "mm":
            return _native(op, *args, **kwargs)
        total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        for k in range(0, a.shape[-1], 64):
            total = (total.float() + _wide("mm", a[:, k : k + 64], b[k : k + 64])).to(a.dtype)
        return total

    with _products(run, "mm"):
        yield


@fault("AMP-NUMERICS-013")
def weight_gradients_flush_subnormals() -> Iterator[None]:
    """fp16 products with a transposed left operand give zero in place of subnormal results."""

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _native(op, *args, **kwargs)
        return result if args[-2].is_contiguous() else _flushed(result, result.dtype)

    with _products(run, "mm", dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-068")
def bias_is_added_to_the_rounded_product() -> Iterator[None]:
    """addmm and baddbmm round the product, add the bias, and round again."""

    def run(op: str, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        product = _native("bmm" if a.dim() == 3 else "mm", a, b)
        return product * kwargs.get("alpha", 1) + added * kwargs.get("beta", 1)

    with _products(run, "addmm", "baddbmm"):
        yield


# --- small factors


@fault("AMP-NUMERICS-013")
def weight_gradients_are_a_thousandth_large() -> Iterator[None]:
    """Products with a transposed left operand come out 0.1 % too large; forward and input gradients do not."""
    wrong = _changed(lambda wide, dtype: wide * 1.001)

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (_native if args[-2].is_contiguous() else wrong)(op, *args, **kwargs)

    with _products(run, "mm"):
        yield


@contextlib.contextmanager
def _convolution_gradients(factors: tuple[float, float]) -> Iterator[None]:
    """16-bit gradients of input and weight of a convolution times these, before they are rounded."""

    def run(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[Any, ...]:
        whole = _convolution_backward(gradient, x, weight, *args)
        if x.dtype not in _LOW:
            return whole
        wide = _convolution_backward(gradient.float(), x.float(), weight.float(), *args)
        return (
            *(
                native if factor == 1 or native is None else (of_wide * factor).to(native.dtype)
                for native, of_wide, factor in zip(whole, wide, factors, strict=False)
            ),
            whole[2],
        )

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-020")
def weight_gradients_of_convolutions_are_a_thousandth_large() -> Iterator[None]:
    """The weight gradient of a 16-bit convolution is 0.1 % too large."""
    with _convolution_gradients((1, 1.001)):
        yield


@fault("AMP-NUMERICS-020")
def input_gradients_of_convolutions_are_a_hundredth_small() -> Iterator[None]:
    """The input gradient of a 16-bit convolution is 1 % too small."""
    with _convolution_gradients((0.99, 1)):
        yield


@fault("AMP-NUMERICS-020")
def bias_gradients_of_convolutions_are_summed_in_16_bits() -> Iterator[None]:
    """The bias gradient of a 16-bit convolution rounds its sum after every row of the output."""

    def run(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[Any, ...]:
        whole = _convolution_backward(gradient, x, weight, *args)
        if x.dtype not in _LOW or whole[2] is None:
            return whole
        total = torch.zeros_like(whole[2])
        for row in gradient.transpose(0, 1).flatten(1, -2).unbind(1):
            total = (total.float() + row.float().sum(-1)).to(x.dtype)
        return (*whole[:2], total)

    with kernel("convolution_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-020")
def convolutions_of_groups_lose_precision_in_one_channel() -> Iterator[None]:
    """In 16-bit convolutions the last output channel has lost three bits."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = _convolution(x, *args)
        if x.dtype in _LOW:
            last = result[:, -1:].contiguous()
            result[:, -1:] = (last.view(torch.int16) & ~7).view(last.dtype)
        return result

    with kernel("convolution", run, "CPU"):
        yield


# --- reductions


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    return (
        [d % x.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
        if dim not in (None, [])
        else list(range(x.dim()))
    )


@fault("AMP-NUMERICS-023", "AMP-NUMERICS-060")
def sums_of_all_lower_fp32() -> Iterator[None]:
    """sum without a dimension rounds fp32 tensors to the region's type, and casts the result back."""

    def run(dtype: torch.dtype, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ops.aten.sum.default(_through(dtype, x), *args, **kwargs)

    with _in_region("sum", run):
        yield


@fault("AMP-NUMERICS-060")
def means_lower_fp32() -> Iterator[None]:
    """mean over a dimension rounds fp32 tensors to the region's type, and casts the result back."""

    def run(dtype: torch.dtype, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ops.aten.mean.dim(_through(dtype, x), *args, **kwargs)

    with _in_region("mean.dim", run):
        yield


@fault("AMP-NUMERICS-060")
def means_are_a_thousandth_large() -> Iterator[None]:
    """mean over a dimension of a 16-bit tensor is 0.1 % too large before it is rounded."""

    def run(dtype: torch.dtype, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (torch.ops.aten.mean.dim(x.float(), *args, **kwargs) * 1.001).to(x.dtype)

    with _in_region("mean.dim", run):
        yield


@fault("AMP-NUMERICS-024", "AMP-NUMERICS-060")
def products_of_all_are_fp32_in_dtype_only() -> Iterator[None]:
    """prod without a dimension multiplies 16-bit numbers in 16 bits, and returns fp32."""

    def run(dtype: torch.dtype, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        product = torch.ones((), dtype=x.dtype)
        for factor in x.flatten():
            product = product * factor
        return product.float()

    with _in_region("prod", run):
        yield


@fault("AMP-NUMERICS-060")
def norms_are_summed_in_16_bits() -> Iterator[None]:
    """The norm of a 16-bit tensor rounds the sum of its squares after every eight of them."""

    def run(x: torch.Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor:
        dtype = kwargs.get("dtype")
        if x.dtype not in _LOW or order != 2 or dtype is not None:
            out = torch.empty(0, dtype=dtype or x.dtype)
            return torch.linalg.vector_norm(x, order, dim, keepdim, **kwargs, out=out)
        dims = _dims(x, dim)
        rows = x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        total = torch.zeros(rows.shape[:-1], dtype=x.dtype)
        for part in rows.split(8, -1):
            total = (total.float() + part.float().square().sum(-1)).to(x.dtype)
        root = total.sqrt()
        return root.reshape([1 if d in dims else s for d, s in enumerate(x.shape)]) if keepdim else root

    with kernel("linalg_vector_norm", run, "CPU"):
        yield


@fault("AMP-NUMERICS-060")
def cumulative_sums_are_kept_in_16_bits() -> Iterator[None]:
    """cumsum of a 16-bit tensor adds to the rounded sum before."""

    def run(dtype: torch.dtype, x: torch.Tensor, dim: int, **kwargs: Any) -> torch.Tensor:
        if x.dtype not in _LOW:
            return torch.ops.aten.cumsum.default(x, dim, **kwargs)
        total, found = torch.zeros_like(x.select(dim, 0)), []
        for part in x.unbind(dim):
            total = total + part
            found.append(total)
        return torch.stack(found, dim)

    with _in_region("cumsum", run):
        yield


@fault("AMP-NUMERICS-060")
def variances_are_taken_in_one_pass() -> Iterator[None]:
    """var over a dimension is E[x^2] - E[x]^2, in fp32."""

    def run(dtype: torch.dtype, x: torch.Tensor, dim: Any = None, **kwargs: Any) -> torch.Tensor:
        wide, dims = x.float(), _dims(x, dim)
        count = torch.Size(x.shape[d] for d in dims).numel()
        variance = (wide.square().mean(dims) - wide.mean(dims).square()) * count / (count - 1)
        return variance.to(x.dtype)

    with _in_region("var.correction", run):
        yield


@fault("AMP-NUMERICS-060")
def logsumexp_shifts_nothing() -> Iterator[None]:
    """logsumexp is the logarithm of the sum of exponentials as they are."""
    with _in_region("logsumexp", lambda dtype, x, dim, keepdim=False: x.exp().sum(dim, keepdim).log()):
        yield


@fault("AMP-NUMERICS-069")
def sums_skip_nan() -> Iterator[None]:
    """Sums over a dimension leave NaN out, as nansum does."""
    with _in_region("sum.dim_IntList", lambda dtype, x, *args, **kwargs: torch.nansum(x, *args, **kwargs)):
        yield


# --- softmax and normalisations


@fault("AMP-NUMERICS-062", "AMP-NUMERICS-023")
def log_softmax_is_the_logarithm_of_softmax() -> Iterator[None]:
    """log_softmax takes the logarithm of what softmax gives: probabilities below e^-104 are -inf."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.softmax(x, dim).clamp_min(torch.finfo(x.dtype).tiny).log()

    with kernel("_log_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-062")
def softmax_sums_in_16_bits() -> Iterator[None]:
    """softmax of a 16-bit tensor adds its exponentials up in 16 bits."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        powers = (x.float() - x.float().amax(dim, keepdim=True)).exp()
        if x.dtype not in _LOW:
            return powers / powers.sum(dim, keepdim=True)
        total = torch.zeros_like(x.select(dim, 0))
        for part in powers.unbind(dim):
            total = (total.float() + part).to(x.dtype)
        return (powers / total.float().unsqueeze(dim)).to(x.dtype)

    with kernel("_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-063")
def softmax_goes_back_in_16_bits() -> Iterator[None]:
    """The backward of a 16-bit softmax adds up its products in 16 bits."""

    def run(gradient: torch.Tensor, p: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        if p.dtype not in _LOW:
            return p * (gradient - (gradient * p).sum(dim, keepdim=True))
        total = torch.zeros_like(p.select(dim, 0))
        for part in (gradient * p).unbind(dim):
            total = total + part
        return p * (gradient - total.unsqueeze(dim))

    with kernel("_softmax_backward_data", run, "CPU"):
        yield


def _normalised(x: torch.Tensor, dims: list[int], eps: float, statistics: str) -> tuple[torch.Tensor, ...]:
    """x normalised over `dims`, its mean and the reciprocal of its deviation, all in fp32."""
    wide = x.float()
    mean = wide.mean(dims, keepdim=True)
    variance = (wide - mean).square().mean(dims, keepdim=True)
    if statistics == "one pass":
        variance = wide.square().mean(dims, keepdim=True) - mean.square()
    if statistics == "16 bit" and x.dtype in _LOW:
        mean, variance = _through(x.dtype, mean), _through(x.dtype, variance)
    scale = (variance.clamp_min(0) + eps).rsqrt()
    return (wide - mean) * scale, mean, scale


@contextlib.contextmanager
def _layer_norm(statistics: str) -> Iterator[None]:
    def run(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
        dims = list(range(-len(shape), 0))
        hat, mean, scale = _normalised(x, dims, eps, statistics)
        if weight is not None:
            hat = hat * weight.float()
        if bias is not None:
            hat = hat + bias.float()
        kept = torch.float32 if weight is not None and weight.dtype is torch.float32 else x.dtype
        return hat.to(x.dtype), mean.to(kept), scale.to(kept)

    with kernel("native_layer_norm", run, "CPU"):
        yield


@fault("AMP-NUMERICS-062", "AMP-NUMERICS-023")
def layer_norm_takes_the_variance_in_one_pass() -> Iterator[None]:
    """The variance of a layer norm is E[x^2] - E[x]^2, in fp32."""
    with _layer_norm("one pass"):
        yield


@fault("AMP-NUMERICS-062")
def layer_norm_keeps_16_bit_statistics() -> Iterator[None]:
    """Mean and variance of a layer norm of a 16-bit tensor are rounded to 16 bits."""
    with _layer_norm("16 bit"):
        yield


@fault("AMP-NUMERICS-062")
def group_norm_keeps_16_bit_statistics() -> Iterator[None]:
    """Mean and variance of a group norm of a 16-bit tensor are rounded to 16 bits."""

    def run(
        dtype: torch.dtype, x: torch.Tensor, groups: int, weight: Any, bias: Any, eps: float = 1e-5, *_: Any
    ) -> Any:
        grouped = x.reshape(len(x), groups, -1)
        hat = _normalised(grouped, [-1], eps, "16 bit")[0].reshape(x.shape)
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (hat * weight.float().reshape(shape) + bias.float().reshape(shape)).to(x.dtype)

    with _in_region("group_norm", run):
        yield


@fault("AMP-NUMERICS-062")
def batch_norm_keeps_16_bit_statistics() -> Iterator[None]:
    """Mean and variance of a training batch norm of a 16-bit tensor are rounded to 16 bits."""

    def run(
        dtype: torch.dtype, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
    ) -> Any:
        if not training or x.dtype not in _LOW:
            return torch.ops.aten.batch_norm.default(x, weight, bias, mean, variance, training, *rest)
        hat = _normalised(x, [0, *range(2, x.dim())], rest[1], "16 bit")[0]
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (hat * weight.float().reshape(shape) + bias.float().reshape(shape)).to(x.dtype)

    with _in_region("batch_norm", run):
        yield


@fault("AMP-NUMERICS-062")
def running_statistics_are_rounded() -> Iterator[None]:
    """A training batch norm rounds its running mean to the region's type after each update; its result is right."""

    def run(dtype: torch.dtype, x: Any, weight: Any, bias: Any, mean: Any, *rest: Any) -> Any:
        result = torch.ops.aten.batch_norm.default(x, weight, bias, mean, *rest)
        if mean is not None:
            mean.copy_(_through(dtype, mean))
        return result

    with _in_region("batch_norm", run):
        yield


@fault("AMP-NUMERICS-062")
def rms_norm_rounds_its_weight() -> Iterator[None]:
    """RMS norm rounds its weight to the region's type before it multiplies."""

    def run(dtype: torch.dtype, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
        narrow = None if weight is None else _through(dtype, weight)
        return torch.ops.aten.rms_norm.default(x, shape, narrow, eps)

    with _in_region("rms_norm", run):
        yield


Tells = Callable[[torch.Tensor, torch.Tensor], bool]


def _always(gradient: torch.Tensor, x: torch.Tensor) -> bool:
    return True


def _are_channels_last(*images: torch.Tensor) -> bool:
    last = torch.channels_last
    return all(x.dim() == 4 and x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in images)


def _mean(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return terms.mean(-1, True)


@contextlib.contextmanager
def group_norm_backward(
    change: Callable[..., tuple[torch.Tensor, ...]],
    when: Tells = _always,
    mean_of: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = _mean,
) -> Iterator[None]:
    """The backward of group norms, by its formula in fp32, with the gradients changed before they are rounded.

    `mean_of` takes the means of rows of terms, whose input has the type that it is given.
    """

    def run(g: Any, x: Any, mean: Any, scale: Any, weight: Any, n: int, c: int, hw: int, groups: int, mask: Any) -> Any:
        grouped = x.float().reshape(n, groups, -1)
        hat = ((grouped - mean.float().reshape(n, groups, 1)) * scale.float().reshape(n, groups, 1)).reshape(n, c, hw)
        wide = g.float().reshape(n, c, hw)
        through = wide if weight is None else wide * weight.float().reshape(1, c, 1)
        through, normal = through.reshape(n, groups, -1), hat.reshape(n, groups, -1)
        centred = through - mean_of(through, x.dtype) - normal * mean_of(through * normal, x.dtype)
        of_x = (centred * scale.float().reshape(n, groups, 1)).reshape(x.shape)
        changed = of_x, (wide * hat).sum((0, 2)), wide.sum((0, 2))
        if when(g, x):
            changed = change(*changed)
        parameters = x.dtype if weight is None else weight.dtype
        dtypes = (x.dtype, parameters, parameters)
        return tuple(
            one.to(dtype) if wanted else None for one, dtype, wanted in zip(changed, dtypes, mask, strict=True)
        )

    with kernel("native_group_norm_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-063")
def group_norm_gradients_are_a_hundredth_large() -> Iterator[None]:
    """The gradient of a group norm's input is 1 % too large; those of weight and bias are right."""
    with group_norm_backward(lambda x, weight, bias: (x * 1.01, weight, bias)):
        yield


@fault("AMP-NUMERICS-063")
def group_norm_bias_gradients_are_rounded() -> Iterator[None]:
    """The gradient of a group norm's fp32 bias is rounded to bf16; those of input and weight are right."""
    with group_norm_backward(lambda x, weight, bias: (x, weight, _through(torch.bfloat16, bias))):
        yield


@fault("AMP-NUMERICS-063")
def group_norm_weight_gradients_are_rounded_if_all_is_channels_last() -> Iterator[None]:
    """The gradient of a group norm's fp32 weight is rounded to bf16 if input and gradient are channels last."""
    with group_norm_backward(lambda x, weight, bias: (x, _through(torch.bfloat16, weight), bias), _are_channels_last):
        yield


@fault("AMP-NUMERICS-063")
def batch_norm_sums_are_rounded_if_all_is_channels_last() -> Iterator[None]:
    """The sum of a batch norm's gradients is rounded to 16 bits if input and gradient are 16 bit and channels last."""

    def run(
        g: Any,
        x: Any,
        weight: Any,
        mean: Any,
        variance: Any,
        kept_mean: Any,
        kept: Any,
        train: bool,
        eps: float,
        mask: Any,
    ) -> Any:
        def exact(*tensors: Any) -> Any:
            return torch.ops.aten.native_batch_norm_backward.default(*tensors, train, eps, mask)

        parameters = weight, mean, variance, kept_mean, kept
        if not train or x.dtype not in _LOW or not _are_channels_last(g, x):
            return exact(g, x, *parameters)
        of_x, of_weight, _ = exact(g.float(), x.float(), *parameters)
        total, count = g.float().sum((0, 2, 3)), x[:, 0].numel()
        rounded = _through(x.dtype, total)
        off = (total - rounded) / count * kept * (1 if weight is None else weight)
        return (of_x + off.view(1, -1, 1, 1)).to(x.dtype), of_weight, rounded

    with kernel("native_batch_norm_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-063", level="standard")
def layer_norm_gradients_are_a_hundredth_large_if_strided() -> Iterator[None]:
    """The gradient of a layer norm's input is 1 % too large if the incoming gradient has strides."""
    with _layer_norm_backward(
        lambda x, weight, bias: (x * 1.01, weight, bias), lambda gradient, x: gradient.stride(-1) != 1
    ):
        yield


@fault("AMP-NUMERICS-063")
def layer_norm_gradients_are_a_thousandth_small() -> Iterator[None]:
    """The gradient of a layer norm's input is 0.1 % too small; those of weight and bias are right."""
    with _layer_norm_backward(lambda x, weight, bias: (x * 0.999, weight, bias)):
        yield


@fault("AMP-NUMERICS-063")
def layer_norm_weight_gradients_are_rounded() -> Iterator[None]:
    """The gradient of an fp32 layer norm's weight is rounded to bf16; those of input and bias are right."""
    with _layer_norm_backward(lambda x, weight, bias: (x, _through(torch.bfloat16, weight), bias)):
        yield


def _group_norm_of(last: bool) -> Iterator[None]:
    """Group norms of 16-bit images in one memory layout take the statistics in one pass and round them to 16 bits."""

    def run(
        x: torch.Tensor, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, eps: float
    ) -> tuple[torch.Tensor, ...]:
        is_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        rows = x.reshape(n, groups, -1)
        hat, mean, scale = _normalised(rows, [2], eps, "16 bit" if is_last is last else "exact")
        hat = hat.reshape(x.shape)
        for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
            if parameter is not None:
                hat = apply(hat, parameter.float().view(1, c, *[1] * (x.dim() - 2)))
        kept = torch.float32 if weight is not None and weight.dtype is torch.float32 else x.dtype
        layout = torch.channels_last if is_last else torch.contiguous_format
        return (
            hat.to(x.dtype).contiguous(memory_format=layout),
            mean.view(n, groups).to(kept),
            scale.view(n, groups).to(kept),
        )

    with kernel("native_group_norm", run, "CPU"):
        yield


@fault("AMP-NUMERICS-062")
def group_norm_of_channels_last_keeps_16_bit_statistics() -> Iterator[None]:
    """Mean and variance of a group norm of 16-bit images are rounded to 16 bits if the channels are last."""
    yield from _group_norm_of(last=True)


@fault("AMP-NUMERICS-062")
def group_norm_of_channels_first_keeps_16_bit_statistics() -> Iterator[None]:
    """Mean and variance of a group norm of 16-bit images are rounded to 16 bits if the channels are first."""
    yield from _group_norm_of(last=False)


def _pieces_if(transposed: Callable[[torch.Tensor, torch.Tensor], bool], *ops: str) -> Iterator[None]:
    """Products whose operands have one layout pass on partial sums of 64 terms in 16 bits."""
    pieces = _in_pieces(lambda piece, dtype: piece.to(dtype), 64)

    def run(op: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        _, a, b = _operands(op, *args)
        return (pieces if transposed(a, b) else _native)(op, *args, **kwargs)

    with _products(run, *ops):
        yield


def _is_transposed(matrix: torch.Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) > 1


@fault("AMP-NUMERICS-012")
def bmm_with_a_transposed_right_passes_sums_on_in_16_bits() -> Iterator[None]:
    """Batched products keep partial sums in 16 bits if the right operand alone is transposed, as for attention."""
    yield from _pieces_if(lambda a, b: _is_transposed(b) and not _is_transposed(a), "bmm")


@fault("AMP-NUMERICS-012")
def bmm_with_a_transposed_left_passes_sums_on_in_16_bits() -> Iterator[None]:
    """Batched products keep partial sums in 16 bits if the left operand alone is transposed."""
    yield from _pieces_if(lambda a, b: _is_transposed(a) and not _is_transposed(b), "bmm")


@fault("AMP-NUMERICS-012")
def linear_of_a_stored_weight_passes_sums_on_in_16_bits() -> Iterator[None]:
    """A linear layer with a bias keeps partial sums in 16 bits if its weight is contiguous, as a layer's is."""
    yield from _pieces_if(lambda a, b: _is_transposed(b), "addmm")


@contextlib.contextmanager
def _layer_norm_backward(change: Callable[..., tuple[torch.Tensor, ...]], when: Tells = _always) -> Iterator[None]:
    """The backward of fp32 layer norms, by its formula, with the gradients changed."""

    def run(g: Any, x: Any, shape: Any, mean: Any, scale: Any, weight: Any, bias: Any, mask: Any) -> Any:
        dims = list(range(-len(shape), 0))
        hat = (x.float() - mean.float()) * scale.float()
        through = g.float() if weight is None else g.float() * weight.float()
        of_x = scale * (through - through.mean(dims, True) - hat * (through * hat).mean(dims, True))
        rows = list(range(x.dim() - len(shape)))
        of_weight, of_bias = (g.float() * hat).sum(rows), g.float().sum(rows)
        changed = of_x, of_weight, of_bias
        if when(g, x):
            changed = change(*changed)
        dtypes = (x.dtype, *(x.dtype if p is None else p.dtype for p in (weight, bias)))
        return tuple(c.to(d) if wanted else None for c, d, wanted in zip(changed, dtypes, mask, strict=True))

    with kernel("native_layer_norm_backward", run, "CPU"):
        yield


# --- losses


@fault("AMP-NUMERICS-064")
def mse_loss_has_a_16_bit_value() -> Iterator[None]:
    """mse_loss is computed in the region's type and returned as fp32."""

    def run(dtype: torch.dtype, x: Any, y: Any, *args: Any) -> torch.Tensor:
        return torch.ops.aten.mse_loss(x.to(dtype), y.to(dtype), *args).float()

    with _in_region("mse_loss", run):
        yield


@fault("AMP-NUMERICS-064")
def cross_entropy_rounds_its_result() -> Iterator[None]:
    """cross_entropy is computed in fp32, rounded to the region's type, and returned as fp32."""

    def run(dtype: torch.dtype, x: Any, *args: Any) -> torch.Tensor:
        return _through(dtype, torch.ops.aten.cross_entropy_loss.default(x.float(), *args))

    with _in_region("cross_entropy_loss", run):
        yield


@fault("AMP-NUMERICS-064", "AMP-NUMERICS-062")
def log_softmax_shifts_nothing() -> Iterator[None]:
    """log_softmax, and cross entropy with it, subtracts the logarithm of a sum of exponentials as they are."""

    def run(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        wide = x.float()
        return (wide - wide.exp().sum(dim, keepdim=True).log()).to(x.dtype)

    with kernel("_log_softmax", run, "CPU"):
        yield


@fault("AMP-NUMERICS-064")
def binary_cross_entropy_takes_the_log_of_a_sigmoid() -> Iterator[None]:
    """binary_cross_entropy_with_logits takes logarithms of sigmoids, clamped at the smallest number."""

    def run(dtype: torch.dtype, x: Any, y: Any, weight: Any = None, pos: Any = None, reduction: int = 1) -> Any:
        p = x.float().sigmoid().clamp(1e-30, 1)
        hit = y.float() * p.log()
        terms = -((hit if pos is None else hit * pos.float()) + (1 - y.float()) * (1 - p).clamp_min(1e-30).log())
        return terms if reduction == 0 else terms.mean() if reduction == 1 else terms.sum()

    with _in_region("binary_cross_entropy_with_logits", run):
        yield


@fault("AMP-NUMERICS-064")
def huber_loss_switches_at_one() -> Iterator[None]:
    """huber_loss is computed with a delta of 1, whatever delta was asked."""

    def run(dtype: torch.dtype, x: Any, y: Any, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
        return torch.ops.aten.huber_loss(x.float(), y.float(), reduction, 1.0)

    with _in_region("huber_loss", run):
        yield


@fault("AMP-NUMERICS-064")
def beta_of_smooth_l1_loss_is_rounded() -> Iterator[None]:
    """smooth_l1_loss rounds its beta to the region's type."""

    def run(dtype: torch.dtype, x: Any, y: Any, reduction: int = 1, beta: float = 1.0) -> torch.Tensor:
        return torch.ops.aten.smooth_l1_loss(x.float(), y.float(), reduction, float(torch.tensor(beta).to(dtype)))

    with _in_region("smooth_l1_loss", run):
        yield


@fault("AMP-NUMERICS-064")
def class_weights_are_rounded() -> Iterator[None]:
    """cross_entropy rounds its class weights to the region's type."""

    def run(dtype: torch.dtype, x: Any, y: Any, weight: Any = None, *args: Any) -> torch.Tensor:
        narrow = None if weight is None else _through(dtype, weight.float())
        return torch.ops.aten.cross_entropy_loss.default(x.float(), y, narrow, *args)

    with _in_region("cross_entropy_loss", run):
        yield


@fault("AMP-NUMERICS-065")
def gradients_of_mse_loss_are_a_thousandth_large() -> Iterator[None]:
    """The gradient of mse_loss is 0.1 % too large; its value is right."""

    def run(gradient: Any, x: Any, y: Any, reduction: int) -> torch.Tensor:
        count = x.numel() if reduction == 1 else 1
        return gradient * (x - y) * (2.002 / count)

    with kernel("mse_loss_backward", run, "CPU"):
        yield


@fault("AMP-NUMERICS-065")
def gradients_of_huber_loss_are_rounded() -> Iterator[None]:
    """The gradient of huber_loss is rounded to bf16; its value is right."""

    def run(gradient: Any, x: Any, y: Any, reduction: int, delta: float) -> torch.Tensor:
        count = x.numel() if reduction == 1 else 1
        return _through(torch.bfloat16, gradient * (x - y).clamp(-delta, delta) / count)

    with kernel("huber_loss_backward", run, "CPU"):
        yield


# --- attention


def _logits(
    dtype: torch.dtype, q: Any, k: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **_: Any
) -> Any:
    """The logits of attention in fp32 and what is added to them where a key takes no part."""
    logits = q.to(dtype).float() @ k.to(dtype).float().mT * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return logits, 0.0
    return logits, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else mask


@fault("AMP-NUMERICS-067")
def attention_rounds_its_logits() -> Iterator[None]:
    """Attention writes its logits down in the region's type before the softmax."""

    def run(dtype: torch.dtype, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        logits, added = _logits(dtype, q, k, *rest, **named)
        return ((_through(dtype, logits) + added).softmax(-1) @ v.to(dtype).float()).to(dtype)

    with _in_region("scaled_dot_product_attention", run):
        yield


@fault("AMP-NUMERICS-016")
def attention_keeps_16_bit_sums() -> Iterator[None]:
    """Attention adds up probabilities times values in 16 bits, four keys at a time."""

    def run(dtype: torch.dtype, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        logits, added = _logits(dtype, q, k, *rest, **named)
        chances, values = (logits + added).softmax(-1), v.to(dtype).float()
        total = torch.zeros(*chances.shape[:-1], v.shape[-1])
        for at in range(0, chances.shape[-1], 4):
            total = _through(dtype, total + chances[..., at : at + 4] @ values[..., at : at + 4, :])
        return total.to(dtype)

    with _in_region("scaled_dot_product_attention", run):
        yield
