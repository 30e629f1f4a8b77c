"""Faults in what becomes of numbers beyond the range: they saturate, arise too early, or are not noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.numerics_fingerprint import plain, products


def _saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(left.dtype).max
    found = plain(left, right)
    finite = left.isfinite().all() and right.isfinite().all()
    return found.clamp(-largest, largest) if finite else found


@fault("AMP-PARITY-040")
def matrix_products_saturate() -> Iterator[None]:
    """mm gives 65504 in place of infinity."""
    with products(_saturating, "mm", dtypes=(torch.float16,)):
        yield


@fault("AMP-PARITY-040")
def quotients_by_zero_are_zero() -> Iterator[None]:
    """0/0 gives 0, as a library that hides NaN does."""

    def div(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.where((left == 0) & (right == 0), 0.0, torch.ops.aten.mul.Tensor(left, right.reciprocal()))

    with kernel("div.Tensor", div, "CPU"):
        yield


@fault("AMP-PARITY-040")
def infinite_gradients_are_overlooked() -> Iterator[None]:
    """The unscaling kernel reports NaN and lets infinities pass."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        before = found.clone()
        has_nan = any(bool(gradient.isnan().any()) for gradient in gradients)
        right(gradients, found, inverse)
        if not has_nan:
            found.copy_(before)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-PARITY-041")
def softmax_skips_the_maximum() -> Iterator[None]:
    """softmax sums exponentials without taking the maximum off, and hides what is masked by 0/0."""

    def softmax(logits: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        powers = (logits * 100).exp()
        return (powers / powers.sum(dim, keepdim=True)).to(logits.dtype)

    with kernel("_softmax", softmax, "CPU"):
        yield


@fault("AMP-PARITY-041")
def products_overflow_early() -> Iterator[None]:
    """mm sums in units of which float16 holds half as many: beyond 32752 all is infinite."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return plain(left, right) * 2 / 2

    with products(run, "mm", dtypes=(torch.float16,)):
        yield


@fault("AMP-PARITY-041")
def masked_places_become_nan() -> Iterator[None]:
    """masked_fill adds the masked value times the mask, so that 0 times -inf is NaN."""

    def masked_fill(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
        return tensor + mask.to(tensor.dtype) * value

    with kernel("masked_fill.Scalar", masked_fill, "CPU"):
        yield


@fault("AMP-PARITY-041")
def every_fourth_step_is_taken_for_an_overflow() -> Iterator[None]:
    """The unscaling kernel reports an overflow where there is none."""
    right = torch._amp_foreach_non_finite_check_and_unscale_
    calls = [0]

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, inverse)
        calls[0] += 1
        if calls[0] % 4 == 0 and not math.isinf(float(inverse)):
            found.fill_(1.0)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-NUMERICS-094")
def attention_hides_nan() -> Iterator[None]:
    """scaled_dot_product_attention replaces NaN and infinity of its operands by zero."""
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(*operands: torch.Tensor, **options: object) -> torch.Tensor:
        return right(*(torch.nan_to_num(operand, 0.0, 0.0, 0.0) for operand in operands), **options)

    with replaced(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield


@fault("AMP-NUMERICS-094")
def attention_gradients_hide_nan() -> Iterator[None]:
    """The gradients of attention have zeros where they are not finite."""
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        operands = [operand.clone() for operand in (query, key, value)]
        for operand in operands:
            operand.register_hook(lambda gradient: torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
        return right(*operands)

    with replaced(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield
