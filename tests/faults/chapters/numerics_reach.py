"""Broken arithmetic that only larger, rarer or gradient-free calls meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.numerics import _convolution

_LOW = (torch.float16, torch.bfloat16)
# Every kernel of a composite op is the same, so this one leads past the broken one.
_ELSEWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)


@fault("AMP-NUMERICS-040", "AMP-NUMERICS-011")
def the_last_of_many_matrices_is_another() -> Iterator[None]:
    """A batched product of 16 matrices and more computes the last one from the one before it."""

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = torch.ops.aten.bmm.out(left, right, out=torch.empty(0, dtype=left.dtype))
        if len(left) >= 16 and left.dtype in _LOW:
            result[-1] = result[-2]
        return result

    with kernel("bmm", bmm, "CPU"):
        yield


@fault("AMP-NUMERICS-040")
def matrices_beyond_sixteen_bits_are_the_first() -> Iterator[None]:
    """A batched product of more than 65535 matrices counts those of its second operand in 16 bits."""

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if len(right) > 65535 and right.dtype in _LOW:
            right = right[torch.arange(len(right)) % 65536]
        return torch.ops.aten.bmm.out(left, right, out=torch.empty(0, dtype=left.dtype))

    with kernel("bmm", bmm, "CPU"):
        yield


@fault("AMP-NUMERICS-040", "AMP-NUMERICS-011")
def matrices_beyond_eight_bits_are_the_first() -> Iterator[None]:
    """A batched product of more than 255 matrices counts those of its first operand in 8 bits."""

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if len(left) > 255 and left.dtype in _LOW:
            left = left[torch.arange(len(left)) % 256]
        return torch.ops.aten.bmm.out(left, right, out=torch.empty(0, dtype=left.dtype))

    with kernel("bmm", bmm, "CPU"):
        yield


@fault("AMP-NUMERICS-040")
def columns_beyond_a_thousand_are_summed_in_halves() -> Iterator[None]:
    """16-bit mm adds the two halves of the sum up in 16 bits in the columns from 1024 on."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = torch.ops.aten.mm.out(left, right, out=torch.empty(0, dtype=left.dtype))
        half = left.shape[1] // 2
        if left.dtype in _LOW and right.shape[1] > 1024 and half > 0:
            far = right[:, 1024:]
            halves = [(left[:, :half], far[:half]), (left[:, half:], far[half:])]
            first, second = (torch.ops.aten.mm.out(x, y, out=torch.empty(0, dtype=left.dtype)) for x, y in halves)
            result[:, 1024:] = first + second
        return result

    with kernel("mm", mm, "CPU"):
        yield


@fault("AMP-NUMERICS-040")
def inference_quantises_weights() -> Iterator[None]:
    """Without gradients torch.nn.functional.linear rounds each row of weights to 8 bits."""
    right = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.is_grad_enabled():
            step = weight.abs().amax(1, keepdim=True) / 127
            weight = (weight / step).round() * step
        return right(x, weight, bias)

    with replaced(torch.nn.functional, "linear", linear):
        yield


@fault("AMP-NUMERICS-040")
def the_factor_of_what_is_added_is_ignored() -> Iterator[None]:
    """16-bit addmm takes its beta for 1."""

    def addmm(
        added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        beta = 1 if left.dtype in _LOW else beta
        return torch.ops.aten.addmm.out(
            added, left, right, beta=beta, alpha=alpha, out=torch.empty(0, dtype=left.dtype)
        )

    with kernel("addmm", addmm, "CPU"):
        yield


@fault("AMP-NUMERICS-022")
def large_fp32_products_run_in_tf32() -> Iterator[None]:
    """fp32 products of 512 columns and more cut their operands to 10 bits, as matrix units do in TF32."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype is torch.float32 and right.shape[1] >= 512:
            left, right = cut(left), cut(right)
        return torch.ops.aten.mm.out(left, right, out=torch.empty(0, dtype=left.dtype))

    with kernel("mm", mm, "CPU"):
        yield


@fault("AMP-NUMERICS-002")
def casts_of_a_million_truncate_their_tail() -> Iterator[None]:
    """Casts of 2^20 numbers and more cut the bits of the last 64 off."""

    def cast(x: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):  # a Python number in an expression
            return torch.full((), x, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        copied = torch.ops.aten._to_copy.default.redispatch(_ELSEWHERE, x, **kwargs)
        if x.numel() > 2**20 and x.dtype is torch.float32 and copied.dtype in _LOW:
            tail = x.flatten()[-64:]
            near = torch.empty_like(tail, dtype=copied.dtype).copy_(tail)
            back = torch.empty_like(tail).copy_(near)
            below = (near.view(torch.int16) - 1).view(copied.dtype)
            copied.view(-1)[-64:] = torch.where((back.abs() > tail.abs()) & near.isfinite(), below, near)
        return copied

    with kernel("_to_copy", cast, "CPU"):
        yield


@fault("AMP-NUMERICS-025")
def long_sums_lose_their_tail() -> Iterator[None]:
    """sum() of more than 4096 numbers leaves out those beyond a multiple of 16."""

    def whole(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        kept = x.flatten()[: x.numel() // 16 * 16] if x.numel() > 4096 else x
        return torch.ops.aten.sum.IntList_out(
            kept, list(range(kept.dim())), dtype=dtype, out=torch.empty(0, dtype=dtype or x.dtype)
        )

    with kernel("sum", whole, "CPU"):
        yield


@fault("AMP-NUMERICS-100")
def gelu_backward_runs_in_sixteen_bits() -> Iterator[None]:
    """The gradient of GELU is evaluated in the 16-bit type, each step rounded."""

    def backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        one = x if x.dtype in _LOW else x.double()
        density = (-one * one / 2).exp() * 0.3989422804
        return gradient * (0.5 * (1 + (one * 0.7071067812).erf()) + one * density).to(gradient.dtype)

    with kernel("gelu_backward", backward, "CPU"):
        yield


def _attention(
    **changes: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Attention with some of its options worked out anew from query, key and the options that were given."""
    right = torch.nn.functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        given = {"attn_mask": None, "is_causal": False, "scale": None, **options}
        return right(
            query, key, value, **{**options, **{name: change(query, key, given) for name, change in changes.items()}}
        )

    return replaced(torch.nn.functional, "scaled_dot_product_attention", attention)


@fault("AMP-NUMERICS-048")
def attention_ignores_its_scale() -> Iterator[None]:
    """Attention divides by the root of the size of a head, whatever scale is given."""
    with _attention(scale=lambda query, key, given: None):
        yield


@fault("AMP-NUMERICS-048")
def causal_masks_end_at_the_lower_right() -> Iterator[None]:
    """The causal mask of fewer queries than keys lets the last query see every key."""

    def mask(query: torch.Tensor, key: torch.Tensor, given: dict[str, Any]) -> Any:
        queries, keys = query.shape[-2], key.shape[-2]
        if not given["is_causal"] or queries == keys:
            return given["attn_mask"]
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    with _attention(
        attn_mask=mask,
        is_causal=lambda query, key, given: given["is_causal"] and query.shape[-2] == key.shape[-2],
    ):
        yield


@fault("AMP-NUMERICS-100")
def tanh_backward_runs_in_sixteen_bits() -> Iterator[None]:
    """The gradient of tanh is evaluated in the 16-bit type, each step rounded."""
    with kernel("tanh_backward", lambda gradient, result: gradient * (1 - result * result), "CPU"):
        yield


@fault("AMP-NUMERICS-045")
def erf_turns_small_numbers_round() -> Iterator[None]:
    """erf of 16-bit numbers below 2^-23 has the sign of its input turned round."""

    def erf(x: torch.Tensor) -> torch.Tensor:
        result = torch.ops.aten.erf.out(x, out=torch.empty(0, dtype=x.dtype))
        return torch.where((x.abs() < 2.0**-23) & torch.tensor(x.dtype in _LOW), -x, result)

    with kernel("erf", erf, "CPU"):
        yield


@fault("AMP-NUMERICS-063")
def softmax_backward_rounds_before_it_subtracts() -> Iterator[None]:
    """The backward of a 16-bit softmax rounds the probability times the sum to 16 bits, then subtracts it."""

    def backward(seed: torch.Tensor, result: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        p, wide = result.float(), seed.float()
        shared = p * (wide * p).sum(dim, keepdim=True)
        if result.dtype in _LOW:
            shared = shared.to(result.dtype).float()
        return (wide * p - shared).to(dtype)

    with kernel("_softmax_backward_data", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-020")
def convolutions_add_halves_of_their_taps_in_16_bits() -> Iterator[None]:
    """A 16-bit convolution that is grouped or dilated rounds the sum over half of its taps, and goes on from that."""

    def convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Any) -> Any:
        _, _, dilation, transposed, _, groups = options
        apart = x.dtype in _LOW and not transposed and (groups > 1 or max(dilation) > 1)
        if not apart or weight.shape[-1] < 2:
            return _convolution(x, weight, bias, *options)
        half = torch.zeros_like(weight)
        half[..., : weight.shape[-1] // 2] = weight[..., : weight.shape[-1] // 2]
        return _convolution(x, half, bias, *options) + _convolution(x, weight - half, None, *options)

    with kernel("convolution", convolution, "CPU"):
        yield


@fault("AMP-NUMERICS-062")
def long_rows_of_whole_blocks_have_a_mean_of_16_bits() -> Iterator[None]:
    """layer_norm adds up 16-bit rows of 512 elements and more, of whole blocks of 64, in their own type."""
    real = torch.nn.functional.layer_norm

    def layer_norm(x: torch.Tensor, shape: Any, *options: Any, **named: Any) -> torch.Tensor:
        result = real(x, shape, *options, **named)
        length = x.shape[-1]
        if x.dtype not in _LOW or len(shape) > 1 or length < 512 or length % 64:
            return result
        total = torch.zeros_like(x[..., 0])
        for block in x.unflatten(-1, (-1, 64)).float().sum(-1).unbind(-1):
            total = (total + block).to(x.dtype)
        moved = x.float().mean(-1) - total.float() / length
        return (result + (moved / x.float().std(-1))[..., None]).to(x.dtype)

    with replaced(torch.nn.functional, "layer_norm", layer_norm):
        yield


@fault("AMP-NUMERICS-141")
def sigmoid_takes_subnormal_gradients_for_zero() -> Iterator[None]:
    """The backward of sigmoid gives zeros in place of float16 numbers below the smallest normal one."""

    def sigmoid_backward(incoming: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        result = incoming * (1 - output) * output
        return result.where(result.abs() >= 2.0**-14, 0) if result.dtype is torch.float16 else result

    with kernel("sigmoid_backward", sigmoid_backward, "CPU"):
        yield


@fault("AMP-NUMERICS-002")
def bfloat16_truncates_what_is_not_contiguous() -> Iterator[None]:
    """Tensor.bfloat16() of a float32 tensor that is not contiguous cuts the last bits off."""
    real = torch.Tensor.bfloat16

    def bfloat16(x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        if x.dtype is not torch.float32 or x.is_contiguous() or x.requires_grad:
            return real(x, *options, **named)
        return real((x.contiguous().view(torch.int32) & -65536).view(torch.float32))

    with replaced(torch.Tensor, "bfloat16", bfloat16):
        yield
