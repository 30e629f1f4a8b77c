"""Faults that shift a training run a little, or a lot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

LOW = (torch.float16, torch.bfloat16)


def _around_step(before: Callable[[Any], object], after: Callable[[Any], object]) -> Callable[..., Any]:
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        before(optimizer)
        result = right(self, optimizer, *args, **options)
        after(optimizer)
        return result

    return step


def _times_lr(factor: float) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    return change


@fault("AMP-PARITY-004")
def learning_rate_a_hundredth_off() -> Iterator[None]:
    """scaler.step runs the optimizer with a learning rate 1 % too high."""
    with replaced(torch.amp.GradScaler, "step", _around_step(_times_lr(1.01), _times_lr(1 / 1.01))):
        yield


@fault("AMP-PARITY-004")
def learning_rate_a_hair_off() -> Iterator[None]:
    """scaler.step runs the optimizer with a learning rate 0.01 % too low."""
    with replaced(torch.amp.GradScaler, "step", _around_step(_times_lr(0.9999), _times_lr(1 / 0.9999))):
        yield


@fault("AMP-PARITY-004")
def weights_are_rounded_after_each_step() -> Iterator[None]:
    """scaler.step leaves weights that a 16-bit type can hold."""

    def narrow(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(parameter.data.half())

    with replaced(torch.amp.GradScaler, "step", _around_step(lambda optimizer: None, narrow)):
        yield


@fault("AMP-PARITY-004")
def weight_decay_is_lost() -> Iterator[None]:
    """scaler.step runs the optimizer without its weight decay."""

    def no_decay(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

    with replaced(torch.amp.GradScaler, "step", _around_step(no_decay, lambda optimizer: None)):
        yield


def _unscale(factor: float) -> Iterator[None]:
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, inverse * factor)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-RECIPE-002", "AMP-PARITY-003")
def gradients_a_thousandth_off() -> Iterator[None]:
    """Unscaled gradients are 0.1 % too large."""
    yield from _unscale(1.001)


@fault("AMP-RECIPE-002")
def gradients_one_part_in_a_million_off() -> Iterator[None]:
    """Unscaled gradients are 1e-6 too large."""
    yield from _unscale(1.000001)


@fault("AMP-RECIPE-002", "AMP-PARITY-003")
def gradients_stay_scaled() -> Iterator[None]:
    """The loss scale is not removed from the gradients."""
    yield from _unscale(65536.0)


@fault("AMP-RECIPE-002", "AMP-PARITY-002")
def training_computes_with_stale_weights() -> Iterator[None]:
    """The weight cache outlives its region, so every step computes with the first weights."""
    with edited(torch.autocast.__exit__, "torch.clear_autocast_cache()", "pass"):
        yield


def _low_product(op: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change what the CPU kernel of mm or addmm gives for 16-bit operands: `change` sees the fp32 result."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in LOW:
            return _fp32_mm(a, b)
        return change(_fp32_mm(a.float(), b.float())).to(a.dtype)

    def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        if a.dtype not in LOW:
            return _fp32_mm(a, b) * alpha + c * beta
        return change(_fp32_mm(a.float(), b.float()) * alpha + c.float() * beta).to(a.dtype)

    products: dict[str, Callable[..., torch.Tensor]] = {"mm": mm, "addmm": addmm}
    with kernel(op, products[op], "CPU"):
        yield


def _fp32_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a[None], b[None])[0]


def _truncated(mantissa: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cut fp32 to that many bits of mantissa, toward zero."""
    mask = -1 << (23 - mantissa)
    return lambda x: (x.contiguous().view(torch.int32) & mask).view(torch.float32)


@fault("AMP-PARITY-003")
def backward_products_a_thousandth_small() -> Iterator[None]:
    """The 16-bit product mm, which backward uses, is 0.1 % too small."""
    yield from _low_product("mm", lambda x: x * 0.999)


@fault("AMP-PARITY-003")
def backward_products_are_truncated() -> Iterator[None]:
    """The 16-bit product mm cuts its result to 7 bits of mantissa in place of rounding it."""
    yield from _low_product("mm", _truncated(7))


@fault("AMP-PARITY-002", "AMP-PARITY-003")
def forward_products_a_hundredth_large() -> Iterator[None]:
    """The 16-bit product addmm, which Linear uses, is 1 % too large."""
    yield from _low_product("addmm", lambda x: x * 1.01)


@fault("AMP-PARITY-003")
def forward_products_are_coarse() -> Iterator[None]:
    """The 16-bit product addmm rounds its result to 5 bits of mantissa."""

    def coarse(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 64) / 64, exponent)

    yield from _low_product("addmm", coarse)


@fault("AMP-PARITY-002")
def loss_is_evaluated_in_16_bit() -> Iterator[None]:
    """cross_entropy and mse_loss give fp32 values that a 16-bit type can hold."""
    cross_entropy, mse_loss = torch.nn.functional.cross_entropy, torch.nn.functional.mse_loss

    def rounded(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: loss(*args, **options).bfloat16().float()

    with (
        replaced(torch.nn.functional, "cross_entropy", rounded(cross_entropy)),
        replaced(torch.nn.functional, "mse_loss", rounded(mse_loss)),
    ):
        yield


@fault("AMP-PARITY-003")
def clipping_is_a_hundredth_lax() -> Iterator[None]:
    """clip_grad_norm_ clips to a norm 1 % too large."""
    right = torch.nn.utils.clip_grad_norm_

    def lax(parameters: Any, max_norm: float, *args: Any, **options: Any) -> torch.Tensor:
        return right(parameters, max_norm * 1.01, *args, **options)

    with replaced(torch.nn.utils, "clip_grad_norm_", lax):
        yield


@fault("AMP-PARITY-008")
def steps_are_skipped_without_cause() -> Iterator[None]:
    """Every fourth step is taken for an overflow."""
    right = torch._amp_foreach_non_finite_check_and_unscale_
    calls = [0]

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, inverse)
        calls[0] += 1
        if calls[0] % 4 == 0:
            found.fill_(1.0)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-PARITY-007")
def relu_prints_fp32() -> Iterator[None]:
    """relu returns fp32 under autocast."""
    with kernel("relu", lambda x: torch.clamp_min(x.float(), 0.0), "AutocastCPU"):
        yield


@fault("AMP-PARITY-005", "AMP-PARITY-006")
def amp_learns_nothing() -> Iterator[None]:
    """scaler.step never steps, and says that it did."""
    with replaced(torch.amp.GradScaler, "step", lambda self, optimizer, *args, **options: None):
        yield


@fault("AMP-RECIPE-002")
def products_run_wide() -> Iterator[None]:
    """linear multiplies in float32 and rounds its result alone."""

    def wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            operands = [None if t is None else t.float() for t in (x, weight, bias)]
            return torch.ops.aten.linear(*operands).to(dtype)

    with kernel("linear", wide, "AutocastCPU"):
        yield
