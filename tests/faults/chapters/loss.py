"""Losses that are evaluated in the wrong type, or give the wrong gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced
from tests.faults.cast_rules import cast, following


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


@fault("AMP-LOSS-002")
def loss_is_off_the_cpu_list() -> Iterator[None]:
    """kl_div has no autocast kernel on the CPU."""
    with dropped("kl_div", "AutocastCPU"):
        yield


@fault("AMP-LOSS-002")
def loss_is_off_the_cuda_list() -> Iterator[None]:
    """smooth_l1_loss has no autocast kernel on CUDA."""
    with dropped("smooth_l1_loss", "AutocastCUDA"):
        yield


@fault("AMP-LOSS-003")
def loss_is_float32_in_name_only() -> Iterator[None]:
    """mse_loss is computed in 16 bit and widened."""

    @_without_autocast
    def widened(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        terms = (x - y).square()
        return (terms, terms.mean(), terms.sum())[reduction].float()

    with kernel("mse_loss", widened, "AutocastCPU"):
        yield


@fault("AMP-LOSS-004")
def loss_lowers_its_inputs() -> Iterator[None]:
    """huber_loss is on the lower precision list, its result widened."""

    @_without_autocast
    def lowered(x: torch.Tensor, y: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
        x, y = x.bfloat16().float(), y.bfloat16().float()
        return torch.ops.aten.huber_loss(x, y, reduction, delta)

    with kernel("huber_loss", lowered, "AutocastCPU"):
        yield


@fault("AMP-LOSS-005")
def loss_lowers_its_targets() -> Iterator[None]:
    """l1_loss rounds float32 targets to the type of 16-bit predictions."""

    @_without_autocast
    def lowered(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        return torch.ops.aten.l1_loss(x.float(), y.to(x.dtype).float(), reduction)

    with kernel("l1_loss", lowered, "AutocastCPU"):
        yield


@fault("AMP-LOSS-003", "AMP-LOSS-006")
def mean_is_taken_in_16_bit() -> Iterator[None]:
    """soft_margin_loss has float32 terms, and a mean that is rounded to 16 bit."""

    @_without_autocast
    def rounded(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        value = torch.ops.aten.soft_margin_loss(x.float(), y.float(), reduction)
        return value if reduction == 0 else value.bfloat16().float()

    with kernel("soft_margin_loss", rounded, "AutocastCPU"):
        yield


@fault("AMP-LOSS-007")
def loss_gradient_is_taken_in_16_bit() -> Iterator[None]:
    """The backward of mse_loss computes the difference and its factor in 16 bit."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, reduction: int) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            ctx.factor = 2 / x.numel() if reduction == 1 else 2
            return torch.ops.aten.mse_loss(x.float(), y.float(), reduction)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            x, y = (tensor.bfloat16() for tensor in ctx.saved_tensors)
            return ((x - y) * ctx.factor * gradient.bfloat16()).to(ctx.saved_tensors[0].dtype), None, None

    @_without_autocast
    def squared(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        return Squared.apply(x, y, reduction)

    with kernel("mse_loss", squared, "AutocastCPU"):
        yield


@fault("AMP-LOSS-009", "AMP-LOSS-010")
def logarithm_is_lowered() -> Iterator[None]:
    """log is on the CPU's lower precision list."""

    @_without_autocast
    def lowered(x: torch.Tensor) -> torch.Tensor:
        return torch.log(x.bfloat16())

    with kernel("log", lowered, "AutocastCPU"):
        yield


@fault("AMP-LOSS-012")
def loss_module_lowers_its_input() -> Iterator[None]:
    """torch.nn.MSELoss rounds its input on the way to the function."""

    def forward(self: torch.nn.MSELoss, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(x.bfloat16(), y.half(), reduction=self.reduction)

    with replaced(torch.nn.MSELoss, "forward", forward):
        yield


@fault("AMP-LOSS-013")
def squares_overflow() -> Iterator[None]:
    """mse_loss squares in 16 bit and sums in float32."""

    @_without_autocast
    def squared(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        terms = (x - y).square().float()
        return (terms, terms.mean(), terms.sum())[reduction]

    with kernel("mse_loss", squared, "AutocastCPU"):
        yield


@fault("AMP-LOSS-014")
def disabled_subregion_stays_enabled() -> Iterator[None]:
    """Entering autocast(enabled=False) leaves an outer region enabled."""
    new = "torch.set_autocast_enabled(self.device, self._enabled or self.prev)"
    with edited(torch.autocast.__enter__, "torch.set_autocast_enabled(self.device, self._enabled)", new):
        yield


@fault("AMP-LOSS-016")
def logits_stay_float32() -> Iterator[None]:
    """linear has no autocast kernel on the CPU, nor have the products that it is made of."""
    with contextlib.ExitStack() as stack:
        for op in ("linear", "matmul", "addmm", "mm"):
            stack.enter_context(dropped(op, "AutocastCPU"))
        yield


@fault("AMP-LOSS-009")
def an_option_of_a_composite_loss_lowers_it() -> Iterator[None]:
    """multilabel_soft_margin_loss with class weights is computed in bf16 in a region."""
    right = functional.multilabel_soft_margin_loss

    def lowered(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
        if weight is None or not torch.is_autocast_enabled("cpu"):
            return right(x, y, weight, **rest)
        return right(x.bfloat16(), y.bfloat16(), weight.bfloat16(), **rest).float()

    with replaced(functional, "multilabel_soft_margin_loss", lowered):
        yield


@fault("AMP-LOSS-006")
def an_option_of_a_listed_loss_lowers_it() -> Iterator[None]:
    """poisson_nll_loss with another eps is computed in 16 bits and widened."""

    @_without_autocast
    def lowered(
        x: torch.Tensor, y: torch.Tensor, log_input: bool, full: bool, eps: float, reduction: int
    ) -> torch.Tensor:
        x, y = (x, y) if eps != 1e-8 else (x.float(), y.float())
        return torch.ops.aten.poisson_nll_loss(x, y, log_input, full, eps, reduction).float()

    with kernel("poisson_nll_loss", lowered, "AutocastCPU"):
        yield


@fault("AMP-LOSS-017")
def loss_of_cuda_is_float32_in_name_only() -> Iterator[None]:
    """mse_loss on CUDA is computed in 16 bit and widened."""

    def widened(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
        return op(**cast(named, amp_dtype)).float()

    with following("mse_loss", widened, "cuda"):
        yield


@fault("AMP-LOSS-020")
def impossible_words_spoil_the_gradients_of_ctc() -> Iterator[None]:
    """ctc_loss zeroes the infinite losses of a batch, but not their gradients where others are finite."""
    right = functional.ctc_loss

    def ctc_loss(*args: Any, zero_infinity: bool = False, **named: Any) -> torch.Tensor:
        made = right(*args, zero_infinity=False, **named)
        mixed = zero_infinity and made.dim() and bool(made.isinf().any()) and not bool(made.isinf().all())
        return torch.where(made.isinf(), 0.0, made) if mixed else right(*args, zero_infinity=zero_infinity, **named)

    with replaced(functional, "ctc_loss", ctc_loss):
        yield


@fault("AMP-LOSS-020")
def labels_are_sharp_beside_one_that_is_ignored() -> Iterator[None]:
    """cross_entropy smooths no label of a batch in which one is ignored."""
    right = functional.cross_entropy

    def cross_entropy(input: Any, target: Any, *args: Any, label_smoothing: float = 0.0, **named: Any) -> torch.Tensor:
        ignored = not target.is_floating_point() and bool((target == -100).any())
        return right(input, target, *args, label_smoothing=0.0 if ignored else label_smoothing, **named)

    with replaced(functional, "cross_entropy", cross_entropy):
        yield
