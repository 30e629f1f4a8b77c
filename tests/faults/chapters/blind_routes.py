"""Faults of one spelling, one lazy sign, one layout, one step of a conversion or one order of a derivative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.blind_uses import LOW, in_a_region


def _below(op: Any, *given: Any, **named: Any) -> Any:
    """Call an op without the autocast rules of the CPU."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return op(*given, **named)


# --- operands with a lazy conjugation or sign, and sparse ones


@fault("AMP-CAST-115")
def bmm_drops_a_lazy_conjugation() -> Iterator[None]:
    """bmm in a region computes with what the memory of a conjugated operand holds."""

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        low = torch.get_autocast_dtype("cpu")
        plain = [x.conj() if x.is_conj() else x if x.is_complex() else x.to(low) for x in (left, right)]
        found: Tensor = _below(torch.bmm, *plain)
        return found

    with kernel("bmm", bmm, "AutocastCPU"):
        yield


@fault("AMP-CAST-115")
def casts_of_mm_drop_a_lazy_sign() -> Iterator[None]:
    """mm in a region loses the sign of an operand that is negated lazily."""

    def mm(left: Tensor, right: Tensor) -> Tensor:
        low = torch.get_autocast_dtype("cpu")
        signs = [torch._neg_view(x) if x.is_neg() else x for x in (left, right)]
        found: Tensor = _below(torch.mm, *(x if x.is_complex() else x.to(low) for x in signs))
        return found

    with kernel("mm", mm, "AutocastCPU"):
        yield


@fault("AMP-CAST-115")
def sparse_addmm_stays_wide() -> Iterator[None]:
    """addmm with a sparse matrix computes in float32 in a region."""

    def addmm(input: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        low = torch.float32 if left.is_sparse else torch.get_autocast_dtype("cpu")
        cast = (x if x.is_complex() else x.to(low) for x in (input, left, right))
        found: Tensor = _below(torch.addmm, *cast, beta=beta, alpha=alpha)
        return found

    with kernel("addmm", addmm, "AutocastCPU"):
        yield


# --- spellings


@fault("AMP-CAST-023")
def reflected_products_of_vectors_stay_wide() -> Iterator[None]:
    """The operator @ of a vector and a matrix computes in float32 in a region."""

    def product(original: Any, self: Tensor, other: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.dim() > 1 or other.dim() < 2):
            return original(self, other)

    with replaced(Tensor, "__matmul__", in_a_region(Tensor.__matmul__, product)):
        yield


@fault("AMP-CAST-023")
def operators_round_a_parameter() -> Iterator[None]:
    """The operator - rounds a parameter on its right to 16 bits in a region."""

    def difference(original: Any, self: Tensor, other: Any) -> Tensor:
        if type(other) is torch.nn.Parameter:
            other = other.to(torch.get_autocast_dtype("cpu")).to(other.dtype)
        found: Tensor = original(self, other)
        return found

    with replaced(Tensor, "__sub__", in_a_region(Tensor.__sub__, difference)):
        yield


# --- conversions


@fault("AMP-REGION-115")
def type_returns_the_tensor_rewrapped() -> Iterator[None]:
    """type(dtype) of a tensor of that dtype is a copy in a region."""

    def typed(original: Any, self: Tensor, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        return found.clone() if found is self else found

    with replaced(Tensor, "type", in_a_region(Tensor.type, typed)):
        yield


@fault("AMP-REGION-115")
def half_and_bfloat16_lose_a_memory_format() -> Iterator[None]:
    """bfloat16(memory_format=...) keeps the format of the tensor."""
    original = Tensor.bfloat16

    def bfloat16(self: Tensor, **named: Any) -> Tensor:
        return original(self)

    with replaced(Tensor, "bfloat16", bfloat16):
        yield


@fault("AMP-NUMERICS-001")
def moves_with_a_dtype_round_twice() -> Iterator[None]:
    """to(device, bfloat16) in one step goes through float16."""
    original = Tensor.to

    def to(self: Tensor, *given: Any, **named: Any) -> Tensor:
        if len(given) == 2 and given[1] is torch.bfloat16:
            self = original(self, torch.float16)
        return original(self, *given, **named)

    with replaced(Tensor, "to", to):
        yield


@fault("AMP-NUMERICS-001")
def assignments_to_slices_truncate() -> Iterator[None]:
    """float32 numbers that are assigned to a slice of a bfloat16 tensor are truncated."""
    original = Tensor.__setitem__

    def assign(self: Tensor, place: Any, value: Any) -> None:
        if self.dtype is torch.bfloat16 and isinstance(value, Tensor) and value.dtype is torch.float32:
            value = (value.contiguous().view(torch.int32) & -65536).view(torch.float32)
        original(self, place, value)

    with replaced(Tensor, "__setitem__", assign):
        yield


# --- backward


class _Changed(torch.autograd.Function):
    """The tensor itself, with a gradient that a function changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.change(slope), None


def _rounded(slope: Tensor) -> Tensor:
    return slope.to(torch.bfloat16).to(slope.dtype)


def _half_of_its_gradient(slope: Tensor) -> Tensor:
    changed: Tensor = _Changed.apply(slope, lambda second: second * 0.5)
    return changed


@fault("AMP-BACKWARD-053")
def quotients_round_the_gradient_of_what_broadcasts() -> Iterator[None]:
    """The operator / rounds the gradient of a float32 divisor that broadcasts against a 16-bit tensor."""

    def divide(original: Any, self: Tensor, other: Any) -> Tensor:
        if self.dtype in LOW and isinstance(other, Tensor) and other.shape != self.shape:
            other = _Changed.apply(other, _rounded)
        found: Tensor = original(self, other)
        return found

    with replaced(Tensor, "__truediv__", in_a_region(Tensor.__truediv__, divide)):
        yield


@fault("AMP-BACKWARD-082")
def fills_in_place_keep_the_version() -> Iterator[None]:
    """masked_fill_ of a 16-bit tensor makes no new version in a region."""

    def fill(original: Any, self: Tensor, *given: Any) -> Tensor:
        if self.dtype not in LOW:
            return original(self, *given)
        with torch.autograd._unsafe_preserve_version_counter(self):
            return original(self, *given)

    with replaced(Tensor, "masked_fill_", in_a_region(Tensor.masked_fill_, fill)):
        yield


@fault("AMP-NUMERICS-117")
def second_derivatives_of_layer_norm_are_halved() -> Iterator[None]:
    """layer_norm of 16-bit tensors halves the second derivatives by what comes in."""
    original = F.layer_norm

    def layer_norm(input: Tensor, *given: Any, **named: Any) -> Tensor:
        changed = _Changed.apply(input, _half_of_its_gradient) if input.dtype in LOW else input
        return original(changed, *given, **named)

    with replaced(F, "layer_norm", layer_norm):
        yield


@fault("AMP-NUMERICS-117")
def second_derivatives_by_weights_of_groups_are_halved() -> Iterator[None]:
    """A 16-bit conv_transpose3d of several groups halves the gradients of its weight's gradient."""
    original = F.conv_transpose3d

    def convolve(input: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        if input.dtype in LOW and named.get("groups", 1) > 1:
            weight = _Changed.apply(weight, _half_of_its_gradient)
        return original(input, weight, *given, **named)

    with replaced(F, "conv_transpose3d", convolve):
        yield


@fault("AMP-NUMERICS-117", level="standard")
def second_derivatives_by_attention_masks_are_halved() -> Iterator[None]:
    """Attention of 16-bit tensors halves the gradients of its mask's gradient."""
    original = F.scaled_dot_product_attention

    def attend(*given: Any, **named: Any) -> Tensor:
        mask = named.get("attn_mask")
        if mask is not None and mask.dtype in LOW:
            named["attn_mask"] = _Changed.apply(mask, _half_of_its_gradient)
        found: Tensor = original(*given, **named)
        return found

    with replaced(F, "scaled_dot_product_attention", attend):
        yield


class _LastRow(torch.autograd.Function):
    """Rows of a table by their numbers; the gradient of a row that is used twice is that of the last use."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(table, index)
        return table[index]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        table, index = ctx.saved_tensors
        return torch.zeros_like(table).index_put((index,), slope), None


@fault("AMP-NUMERICS-085")
def embeddings_lose_repeated_rows_where_deterministic() -> Iterator[None]:
    """With deterministic algorithms embedding of 16-bit tensors loses the gradients of repeated indices."""
    original = F.embedding

    def embedding(input: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        if torch.are_deterministic_algorithms_enabled() and weight.dtype in LOW and not given and not named:
            found: Tensor = _LastRow.apply(weight, input)
            return found
        return original(input, weight, *given, **named)

    with replaced(F, "embedding", embedding):
        yield


# --- lists


@fault("AMP-NUMERICS-118")
def lists_have_the_type_of_their_first() -> Iterator[None]:
    """_foreach_addcmul_ leaves tensors of another type than the first as they are."""
    original = torch._foreach_addcmul_

    def addcmul(self: list[Tensor], left: list[Tensor], right: list[Tensor], *given: Any, **named: Any) -> None:
        if given and isinstance(given[0], list | tuple):
            original(self, left, right, *given, **named)
            return
        like = [place for place, one in enumerate(self) if one.dtype == self[0].dtype]
        original(*([each[place] for place in like] for each in (self, left, right)), *given, **named)

    with replaced(torch, "_foreach_addcmul_", addcmul):
        yield
