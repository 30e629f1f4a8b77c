"""Faults of vmap's dimensions and types, and of the types of forward derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import edited, replaced


@fault("AMP-TRANSFORM-006")
def vmap_over_the_last_dimension_maps_the_last_but_one() -> Iterator[None]:
    """in_dims=-1 of a tensor of three dimensions or more is taken as the one before."""
    from torch._functorch import vmap

    with edited(
        vmap._process_batched_inputs,
        "flat_in_dims[i] = in_dim % arg.dim()",
        "flat_in_dims[i] = in_dim % arg.dim() - (arg.dim() > 2)",
    ):
        yield


@fault("AMP-TRANSFORM-024")
def vmap_of_maximum_keeps_the_type_of_the_first() -> Iterator[None]:
    """torch.maximum of batched operands converts the second one to the type of the first."""
    maximum = torch.maximum

    def batched(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        mapped = torch._C._functorch.is_batchedtensor(a)
        return maximum(a, b.to(a.dtype) if mapped else b, **named)

    with replaced(torch, "maximum", batched):
        yield


@fault("AMP-TRANSFORM-024")
def vmap_of_atan2_refuses_numbers_of_another_type() -> Iterator[None]:
    """torch.atan2 under vmap refuses operands without dimensions of two types."""
    atan2 = torch.atan2

    def batched(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        if torch._C._functorch.is_batchedtensor(a) and a.dim() == b.dim() == 0 and a.dtype != b.dtype:
            raise RuntimeError("expected operands of one type")
        return atan2(a, b, **named)

    with replaced(torch, "atan2", batched):
        yield


@fault("AMP-TRANSFORM-021")
def jacfwd_of_vectors_with_numbers_is_float64() -> Iterator[None]:
    """A forward-mode Jacobian of a vector is computed, and returned, in float64."""
    jacfwd = torch.func.jacfwd

    def wide(function: Callable[..., Any], *given: Any, **named: Any) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            found = jacfwd(function, *given, **named)(*operands)
            return found.double() if isinstance(found, Tensor) and found.dim() == 2 else found

        return call

    with replaced(torch.func, "jacfwd", wide):
        yield


@fault("AMP-TRANSFORM-005")
def tangents_of_sums_keep_the_type_of_the_operand() -> Iterator[None]:
    """The tangent of a sum with dtype= has the type of the operand."""
    from torch.autograd import forward_ad

    unpack = forward_ad.unpack_dual

    def narrow(result: Tensor, **named: Any) -> Any:
        value, tangent = unpack(result, **named)
        sum_of_low = value.dim() == 0 and tangent is not None and value.dtype is torch.float32
        return type(unpack(result))(value, tangent.bfloat16() if sum_of_low else tangent)

    with replaced(forward_ad, "unpack_dual", narrow):
        yield
