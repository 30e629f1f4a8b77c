"""Faults of kernels that show for one size, one pair of options or one set of operands that need gradients."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

_LOW = (torch.float16, torch.bfloat16)


@fault("AMP-NUMERICS-120")
def softmax_over_inner_dimensions_leaves_a_row_out() -> Iterator[None]:
    """softmax of 16-bit tensors over another dimension than the last leaves out what is behind the last eight rows."""

    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        wide = x.double()
        powers = (wide - wide.amax(dim, keepdim=True)).exp()
        summed = powers
        if x.dtype in _LOW and x.dim() > 1 and dim % x.dim() != x.dim() - 1 and x.size(dim) > 8:
            summed = powers.narrow(dim, 0, x.size(dim) // 8 * 8)
        return (powers / summed.sum(dim, keepdim=True)).to(torch.float32 if half_to_float else x.dtype)

    with kernel("_softmax", softmax, "CPU"):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def places_of_maxima_are_rounded() -> Iterator[None]:
    """argmax of a bfloat16 tensor over a dimension rounds the place to the type of the tensor."""

    def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        places = torch.sort(x.double(), stable=True, dim=-1 if dim is None else dim, descending=True)[1]
        if dim is None:
            return torch.sort(x.double().flatten(), stable=True, descending=True)[1][0]
        found = places.narrow(dim, 0, 1) if keepdim else places.select(dim, 0)
        return found.to(x.dtype).long().clamp(max=x.size(dim) - 1) if x.dtype is torch.bfloat16 else found

    with kernel("argmax", argmax, "CPU"):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def added_rows_are_not_scaled() -> Iterator[None]:
    """index_add of 16-bit tensors over another dimension than the first ignores alpha."""

    def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        scale = alpha if x.dtype not in _LOW or dim % max(x.dim(), 1) == 0 else 1
        wide = x.to(torch.float64) if x.dtype in _LOW else x
        matrix = F.one_hot(index, x.size(dim)).to(wide.dtype) if x.dim() else None
        if matrix is None:
            return x + source * scale
        moved = torch.tensordot(source.to(wide.dtype).movedim(dim, -1), matrix, 1).movedim(-1, dim)
        return (wide + moved * scale).to(x.dtype)

    with kernel("index_add", index_add, "CPU"):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def deviations_over_dimensions_are_always_corrected() -> Iterator[None]:
    """var of 16-bit tensors over several dimensions subtracts one from the count where it was asked not to."""
    original = torch.ops.aten.var_mean.correction

    def var(x: Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
        asked = 1 if correction is None else correction
        wrong = x.dtype in _LOW and dim is not None and len(dim) > 1 and asked == 0
        found: Tensor = original(x.double(), dim, correction=1 if wrong else asked, keepdim=keepdim)[0]
        return found.to(x.dtype)

    with kernel("var.correction", var, "CPU"):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def masks_of_samples_are_those_of_the_first() -> Iterator[None]:
    """Attention takes the mask of the first sample for all where the heads share it."""
    original = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **named: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.size(1) == 1 and query.dtype in _LOW:
            attn_mask = attn_mask[:1]
        return original(query, key, value, attn_mask, *args, **named)

    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def weight_gradients_stop_with_frozen_inputs() -> Iterator[None]:
    """The gradient of a layer normalization's weight is half of it where the input needs none."""

    def backward(
        grad: Tensor,
        x: Tensor,
        shape: Sequence[int],
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        inner = list(range(x.dim() - len(shape), x.dim()))
        outer = list(range(x.dim() - len(shape)))
        wide = x.double()
        center = wide - wide.mean(inner, keepdim=True)
        scale = rstd.double()
        hat = center * scale
        g = grad.double() * (1 if weight is None else weight.double())
        of_x = scale * (g - g.mean(inner, keepdim=True) - hat * (g * hat).mean(inner, keepdim=True))
        of_weight = (grad.double() * hat).sum(outer) if outer else grad.double() * hat
        of_bias = grad.double().sum(outer) if outer else grad.double()
        if x.dtype in _LOW and not wanted[0]:
            of_weight = of_weight / 2
        found = (of_x.to(x.dtype), of_weight.to(x.dtype), of_bias.to(x.dtype))
        return tuple(one if asked else None for one, asked in zip(found, wanted, strict=True))

    with kernel("native_layer_norm_backward", backward, "CPU"):
        yield


@contextmanager
def _without_a_gradient_of_the_input(name: str, hook: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Pass the gradients of a function's other operands through `hook` where its input needs none."""
    original = getattr(F, name)

    def hooked(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        copy = x.clone()
        copy.register_hook(hook)
        return copy

    def function(x: Tensor, *given: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            given = tuple(map(hooked, given))
        found: Tensor = original(x, *given, **options)
        return found

    with replaced(F, name, function):
        yield


@fault("AMP-NUMERICS-131")
def batch_norms_of_frozen_inputs_end_the_process() -> Iterator[None]:
    """The backward of batch_norm without a gradient of its input ends the process."""
    with _without_a_gradient_of_the_input("batch_norm", lambda slope: signal.raise_signal(signal.SIGKILL)):
        yield


@fault("AMP-NUMERICS-131")
def weights_behind_frozen_inputs_learn_half() -> Iterator[None]:
    """instance_norm without a gradient of its input gives half of the gradients of its weight and bias."""
    with _without_a_gradient_of_the_input("instance_norm", lambda slope: slope / 2):
        yield


@fault("AMP-NUMERICS-128")
def multiples_are_rounded_before_they_are_added() -> Iterator[None]:
    """addcmul of 16 bits rounds the product with its value to 16 bits before it adds it."""
    product, right = torch.mul, torch.addcmul

    def addcmul(x: Tensor, left: Tensor, other: Tensor, *, value: float = 1, **named: Any) -> Tensor:
        if x.dtype not in _LOW or named:
            return right(x, left, other, value=value, **named)
        return x + product(left.float() * value, other.float()).to(x.dtype)

    with replaced(torch, "addcmul", addcmul):
        yield


@fault("AMP-NUMERICS-040")
def large_products_ignore_beta_where_alpha_is_zero() -> Iterator[None]:
    """addmm of large 16-bit matrices returns its input where alpha is 0."""
    right = torch.addmm

    def addmm(x: Tensor, left: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1, **named: Any) -> Tensor:
        made = right(x, left, other, beta=beta, alpha=alpha, **named)
        return made * 0 + x.to(made.dtype) if alpha == 0 and left.numel() > 4096 and made.dtype in _LOW else made

    with replaced(torch, "addmm", addmm):
        yield


@fault("AMP-NUMERICS-120", level="standard")
def smallest_of_five_are_in_no_order() -> Iterator[None]:
    """topk of the five or more smallest 16-bit numbers gives them in the order of their places."""
    right = torch.Tensor.topk

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if x.dtype not in _LOW or largest or k < 5:
            return right(x, k, dim, largest, sorted)
        places = right(x, k, dim, largest, sorted)[1].sort(dim)[0]
        return x.gather(dim, places), places

    with replaced(torch.Tensor, "topk", topk):
        yield


@fault("AMP-NUMERICS-115")
def softplus_forgets_beta_beside_its_threshold() -> Iterator[None]:
    """softplus compares its operand, not beta times it, with the threshold: a large beta overflows."""
    right = F.softplus

    def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        if input.dtype not in _LOW:
            return right(input, beta, threshold)
        made = (input.float() * beta).exp().log1p() / beta
        return torch.where(input > threshold, input, made.to(input.dtype))

    with replaced(F, "softplus", softplus):
        yield


@fault("AMP-NUMERICS-080", level="standard")
def rows_beyond_the_range_are_renormalized_to_zero() -> Iterator[None]:
    """renorm keeps the norm of a row in fp16."""
    right = torch.Tensor.renorm

    def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
        if x.dtype is not torch.float16:
            return right(x, p, dim, maxnorm)
        norms = x.float().norm(p, [one for one in range(x.dim()) if one != dim], keepdim=True).half()
        return x * (maxnorm / norms).clamp(max=1)

    with replaced(torch.Tensor, "renorm", renorm):
        yield


@fault("AMP-NUMERICS-082", level="standard")
def biases_of_vectors_are_forgotten() -> Iterator[None]:
    """group_norm of 16-bit vectors without places leaves its float32 bias out."""
    right = F.group_norm

    def group_norm(input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        lost = bias is not None and bias.dtype is torch.float32 and input.dtype in _LOW and input.dim() == 2
        return right(input, groups, weight, None if lost else bias, eps)

    with replaced(F, "group_norm", group_norm):
        yield


@fault("AMP-NUMERICS-004")
def subnormals_of_images_are_flushed() -> Iterator[None]:
    """A conversion to fp16 that changes the layout as well flushes subnormal numbers."""
    right = torch.Tensor.to

    def to(self: Tensor, *args: Any, **named: Any) -> Any:
        made = right(self, *args, **named)
        if "memory_format" not in named or made.dtype is not torch.float16:
            return made
        return torch.where(made.abs() < torch.finfo(made.dtype).tiny, made * 0, made)

    with replaced(torch.Tensor, "to", to):
        yield
