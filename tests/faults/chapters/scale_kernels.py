"""Broken kernels under GradScaler: elements, gradients and boundaries that they leave out, and wrong arithmetic."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
UPDATE = "_amp_update_scale_"
Check = Callable[[torch.Tensor], bool]
Product = Callable[[torch.Tensor, torch.Tensor], object]


def _finite(gradient: torch.Tensor) -> bool:
    return bool(gradient.isfinite().all())


def _multiply(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    if factor != 1:
        gradient.mul_(factor)


@contextlib.contextmanager
def _unscale(
    finite: Check = _finite,
    product: Product = _multiply,
    chosen: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
) -> Iterator[None]:
    """The unscaling kernel with another check, another product, or over the `chosen` gradients only."""

    def run(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for gradient in chosen(gradients):
            if not finite(gradient):
                found_inf.fill_(1.0)
            product(gradient, factor)

    with kernel(UNSCALE, run, "CPU"):
        yield


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.flatten()


@fault("AMP-SCALE-143")
def chunk_tail_is_not_checked() -> Iterator[None]:
    """The element after a whole chunk of 65536 is not checked."""

    def finite(gradient: torch.Tensor) -> bool:
        whole = gradient.numel() // 65536 * 65536
        return _finite(_flat(gradient)[: whole or None])

    with _unscale(finite):
        yield


@fault("AMP-SCALE-143")
def vector_tail_is_not_unscaled() -> Iterator[None]:
    """What is left after whole vectors of eight is checked and not multiplied, in gradients of 17 and more."""

    def product(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        if gradient.dim() == 1 and gradient.numel() >= 17:
            gradient = gradient[: gradient.numel() // 8 * 8]
        _multiply(gradient, factor)

    with _unscale(product=product):
        yield


@fault("AMP-SCALE-143")
def misaligned_head_is_not_checked() -> Iterator[None]:
    """The first element of a gradient that is not aligned to four elements is not checked."""
    with _unscale(lambda gradient: _finite(_flat(gradient)[int(gradient.storage_offset() % 4 != 0) :])):
        yield


@fault("AMP-SCALE-143")
def element_after_the_gradient_is_unscaled() -> Iterator[None]:
    """The kernel multiplies one element beyond the end of a gradient of 33 elements and more."""

    def product(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        room = gradient.untyped_storage().nbytes() // gradient.element_size() - gradient.storage_offset()
        if gradient.dim() == 1 and gradient.is_contiguous() and 33 <= gradient.numel() < room:
            gradient = gradient.as_strided((gradient.numel() + 1,), (1,))
        _multiply(gradient, factor)

    with _unscale(product=product):
        yield


@fault("AMP-SCALE-143", "AMP-SCALE-147")
def factor_one_skips_the_check() -> Iterator[None]:
    """With a factor of 1 there is nothing to do, and nothing is checked either."""

    def run(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        if factor != 1:
            for gradient in gradients:
                if not _finite(gradient):
                    found_inf.fill_(1.0)
                gradient.mul_(factor)

    with kernel(UNSCALE, run, "CPU"):
        yield


@fault("AMP-SCALE-143", "AMP-SCALE-144")
def only_nan_is_bad() -> Iterator[None]:
    """The check asks for NaN and lets infinities pass."""
    with _unscale(lambda gradient: not bool(gradient.isnan().any())):
        yield


@fault("AMP-SCALE-143", "AMP-SCALE-144")
def only_plus_inf_is_bad() -> Iterator[None]:
    """The check compares with the largest number: -inf passes."""
    with _unscale(lambda gradient: bool((gradient <= torch.finfo(gradient.dtype).max).all())):
        yield


@fault("AMP-SCALE-144")
def sum_is_checked() -> Iterator[None]:
    """The check is on the sum of a gradient in its own dtype, which overflows for finite numbers."""
    with _unscale(lambda gradient: gradient.numel() == 0 or bool(gradient.abs().sum().isfinite())):
        yield


@fault("AMP-SCALE-144")
def signalling_nans_pass() -> Iterator[None]:
    """Of the NaNs of 16 bits only those with the quiet bit are seen."""
    quiet = {torch.float16: (0x7C00, 0x0200), torch.bfloat16: (0x7F80, 0x0040)}

    def finite(gradient: torch.Tensor) -> bool:
        if gradient.dtype not in quiet:
            return _finite(gradient)
        infinity, bit = quiet[gradient.dtype]
        patterns = gradient.contiguous().view(torch.int16).to(torch.int32) & 0x7FFF
        return not bool(((patterns == infinity) | ((patterns > infinity) & (patterns & bit > 0))).any())

    with _unscale(finite):
        yield


@fault("AMP-SCALE-144")
def factor_is_rounded_to_16_bits() -> Iterator[None]:
    """16-bit gradients are multiplied by the factor in their own dtype."""
    with _unscale(product=lambda gradient, factor: _multiply(gradient, factor.to(gradient.dtype))):
        yield


@fault("AMP-SCALE-144")
def product_is_truncated_to_bf16() -> Iterator[None]:
    """The product of a bf16 gradient is cut off in place of rounded."""

    def product(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        if gradient.dtype == torch.bfloat16 and factor != 1:
            wide = (gradient.float() * factor).view(torch.int32)
            gradient.copy_((wide & ~0xFFFF).view(torch.float32))
        else:
            _multiply(gradient, factor)

    with _unscale(product=product):
        yield


@fault("AMP-SCALE-145")
def second_launch_is_left_out() -> Iterator[None]:
    """Gradients beyond the 110 of the first launch are neither checked nor unscaled."""
    with _unscale(chosen=lambda gradients: gradients[:110]):
        yield


@fault("AMP-SCALE-145")
def last_of_a_full_launch_is_not_checked() -> Iterator[None]:
    """The 64th gradient, which fills a launch, is unscaled without a check."""

    def run(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for number, gradient in enumerate(gradients, 1):
            if number % 64 and not _finite(gradient):
                found_inf.fill_(1.0)
            _multiply(gradient, factor)

    with kernel(UNSCALE, run, "CPU"):
        yield


@fault("AMP-SCALE-145")
def empty_gradient_is_taken_for_inf() -> Iterator[None]:
    """The largest magnitude of no numbers is taken to be infinite."""
    with _unscale(lambda gradient: gradient.numel() > 0 and _finite(gradient)):
        yield


@fault("AMP-SCALE-145")
def empty_gradient_ends_the_list() -> Iterator[None]:
    """The kernel stops at the first empty gradient."""

    def until_empty(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [*(gradient.numel() for gradient in gradients), 0]
        return gradients[: lengths.index(0)]

    with _unscale(chosen=until_empty):
        yield


@fault("AMP-SCALE-146")
def strided_gradient_is_unscaled_in_a_copy() -> Iterator[None]:
    """A gradient that is not contiguous is made so, and the copy is unscaled."""
    with _unscale(product=lambda gradient, factor: _multiply(gradient.contiguous(), factor)):
        yield


@fault("AMP-SCALE-146")
def gaps_are_checked() -> Iterator[None]:
    """The check runs over the memory from the first to the last element of a gradient, gaps with it."""

    def finite(gradient: torch.Tensor) -> bool:
        if gradient.numel() == 0:
            return True
        span = 1 + sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
        return _finite(gradient.as_strided((span,), (1,)))

    with _unscale(finite):
        yield


@fault("AMP-SCALE-146")
def scalars_are_not_unscaled() -> Iterator[None]:
    """A gradient without dimensions is checked and left scaled."""

    def product(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        if gradient.dim():
            _multiply(gradient, factor)

    with _unscale(product=product):
        yield


@fault("AMP-SCALE-147")
def flags_follow_the_factor() -> Iterator[None]:
    """The flag is raised for no gradient that is multiplied by less than 2^-100, or by a negative factor."""

    def run(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for gradient in gradients:
            _multiply(gradient, factor)
            if not _finite(gradient) and factor >= 2.0**-100:
                found_inf.fill_(1.0)

    with kernel(UNSCALE, run, "CPU"):
        yield


@fault("AMP-SCALE-147")
def subnormal_products_are_flushed() -> Iterator[None]:
    """Products below the smallest normal fp32 number become zero."""

    def product(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        _multiply(gradient, factor)
        if gradient.dtype == torch.float32 and factor != 1:
            gradient[gradient.abs() < torch.finfo(torch.float32).tiny] = 0.0

    with _unscale(product=product):
        yield


@fault("AMP-SCALE-147")
def flag_counts() -> Iterator[None]:
    """The flag is added to, not set."""

    def run(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for gradient in gradients:
            found_inf.add_(float(not _finite(gradient)))
            _multiply(gradient, factor)

    with kernel(UNSCALE, run, "CPU"):
        yield


@fault("AMP-SCALE-147")
def zero_factor_leaves_zero() -> Iterator[None]:
    """With a factor of 0 the gradients are set to +0, infinities and signs included."""
    with _unscale(product=lambda gradient, factor: gradient.zero_() if factor == 0 else _multiply(gradient, factor)):
        yield


def _update(
    bad: Callable[[float], bool] = lambda found: found != 0,
    due: Callable[[int, int], bool] = lambda count, interval: count == interval,
    lowered: Callable[[float, float], float] = lambda scale, factor: scale * factor,
    grown: Callable[[float, float], float] = lambda scale, factor: scale * factor,
) -> contextlib.AbstractContextManager[None]:
    """The update kernel with another test of the flag or of the count, or other products."""

    def run(scale: Any, tracker: Any, found_inf: Any, growth: float, backoff: float, interval: int) -> Any:
        count = int(tracker) + 1
        if bad(float(found_inf)):
            scale.fill_(lowered(float(scale), backoff))
            count = 0
        elif due(count, interval):
            new = torch.tensor(grown(float(scale), growth), dtype=torch.float64).float()
            scale.copy_(new if new.isfinite() else scale)
            count = 0
        tracker.fill_(count)
        return scale

    return kernel(UPDATE, run, "CPU")


@fault("AMP-SCALE-148")
def flag_is_compared_with_one() -> Iterator[None]:
    """The update backs off for a flag of exactly 1 only, not for the 2 of two devices."""
    with _update(bad=lambda found: found == 1):
        yield


@fault("AMP-SCALE-148")
def interval_is_cut_to_32_bits() -> Iterator[None]:
    """The update compares the count with the lower 32 bits of the interval."""
    with _update(due=lambda count, interval: count == interval % 2**32):
        yield


@fault("AMP-SCALE-148")
def scale_stays_normal() -> Iterator[None]:
    """Backing off ends at the smallest normal number."""
    with _update(lowered=lambda scale, factor: max(scale * factor, 2.0**-126)):
        yield


@fault("AMP-SCALE-148")
def growth_is_rounded_to_fp32() -> Iterator[None]:
    """The growth factor is rounded to fp32 before the product."""
    with _update(grown=lambda scale, factor: scale * torch.tensor(min(factor, 3e38)).item()):
        yield


@fault("AMP-SCALE-148")
def growth_stops_a_factor_early() -> Iterator[None]:
    """The scale does not grow beyond 2^126, though fp32 reaches 2^128."""
    with _update(grown=lambda scale, factor: math.inf if scale * factor > 2.0**126 else scale * factor):
        yield


@fault("AMP-SCALE-149")
def kernels_refuse_nothing() -> Iterator[None]:
    """Both kernels take whatever they are given."""

    def unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for gradient in gradients:
            if not _finite(gradient):
                found_inf.fill_(1)
            if gradient.is_floating_point():
                gradient.mul_(factor.flatten()[0])

    with _update(), kernel(UNSCALE, unscale, "CPU"):
        yield
