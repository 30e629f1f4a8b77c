"""Faults written blind of values, histories and rare conditions that the checks of their time did not notice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.adadelta import _single_tensor_adadelta
from torch.optim.adam import _single_tensor_adam
from torch.optim.rmsprop import _single_tensor_rmsprop
from torch.optim.sgd import _multi_tensor_sgd, _single_tensor_sgd

from tests.faults import fault
from tests.faults.breaking import edited, replaced

# --- flags of several optimizers

Scaler = torch.amp.GradScaler
COMBINED = "for i in range(1, len(found_infs)):"


@fault("AMP-SCALE-153")
def only_the_first_two_flags_back_off() -> Iterator[None]:
    """update() combines the flags of the first two optimizers."""
    with edited(Scaler.update, COMBINED, "for i in range(1, min(2, len(found_infs))):"):
        yield


@fault("AMP-SCALE-153")
def only_the_first_and_last_flag_back_off() -> Iterator[None]:
    """update() combines the flags of the first and the last optimizer."""
    with edited(Scaler.update, COMBINED, "for i in (len(found_infs) - 1,):"):
        yield


# --- usual settings, late steps


@fault("AMP-OPTIMIZER-032")
def adamw_decay_is_rounded_to_bf16() -> Iterator[None]:
    """AdamW's for-loop takes the factor of its weight decay in bf16, in which a usual one is 1."""
    old = "param.mul_(1 - lr * weight_decay)"
    new = "param.mul_(torch.tensor(1 - lr * weight_decay, dtype=torch.bfloat16).item())"
    with edited(_single_tensor_adam, old, new):
        yield


@fault("AMP-OPTIMIZER-032")
def adam_eps_is_rounded_to_fp16() -> Iterator[None]:
    """Fused Adam takes eps in fp16, in which the default is 0."""
    original = torch._fused_adam_

    @functools.wraps(original)
    def rounded(*tensors: Any, eps: float, **options: Any) -> Any:
        return original(*tensors, eps=torch.tensor(eps, dtype=torch.float16).item(), **options)

    with replaced(torch, "_fused_adam_", rounded):
        yield


@fault("AMP-OPTIMIZER-032")
def bias_correction_ends_at_step_50() -> Iterator[None]:
    """Adam's for-loop corrects no bias after 50 steps."""
    old = "step = _get_value(step_t)"
    with edited(_single_tensor_adam, old, f"{old}; step = step if step < 50 else 1e9"):
        yield


@fault("AMP-OPTIMIZER-032")
def momentum_of_large_tensors_is_bf16() -> Iterator[None]:
    """SGD's for-loop keeps the momentum of more than 1024 elements in the precision of bf16."""
    old = "buf.mul_(momentum).add_(grad, alpha=1 - dampening)"
    new = f"{old}.copy_(buf.bfloat16() if buf.numel() > 1024 else buf)"
    with edited(_single_tensor_sgd, old, new):
        yield


@fault("AMP-OPTIMIZER-120")
def rmsprop_alpha_is_rounded_to_bf16() -> Iterator[None]:
    """RMSprop's for-loop takes alpha in bf16."""
    old = "square_avg.mul_(alpha)"
    with edited(_single_tensor_rmsprop, old, "square_avg.mul_(torch.tensor(alpha, dtype=torch.bfloat16).item())"):
        yield


@fault("AMP-OPTIMIZER-120", level="standard")
def adadelta_rho_is_rounded_to_bf16() -> Iterator[None]:
    """Adadelta's for-loop takes rho of the squared gradients in bf16."""
    old = "square_avg.mul_(rho)"
    with edited(_single_tensor_adadelta, old, "square_avg.mul_(torch.tensor(rho, dtype=torch.bfloat16).item())"):
        yield


# --- gradients that come late


@fault("AMP-OPTIMIZER-107")
def first_momentum_is_halved_but_for_one() -> Iterator[None]:
    """foreach SGD halves the first momentum of every parameter but the first of its list."""
    old = "device_grads[i].detach().clone()"
    with edited(_multi_tensor_sgd, old, f"{old}.div_(2 if bufs else 1)"):
        yield


# --- reads of the host


@fault("AMP-SCALE-029")
def gradients_of_several_dtypes_are_waited_for() -> Iterator[None]:
    """unscale_ reads the scale where gradients have more than one dtype."""
    old = "in per_dtype_grads.values():"
    new = "in (per_dtype_grads.values() if len(per_dtype_grads) < 2 or inv_scale.item() else ()):"
    with edited(Scaler._unscale_grads_, old, new):
        yield


@fault("AMP-SCALE-029")
def sparse_gradients_are_waited_for() -> Iterator[None]:
    """unscale_ reads the scale for each sparse gradient."""
    with edited(Scaler._unscale_grads_, "if param.grad.is_sparse:", "if param.grad.is_sparse and inv_scale.item():"):
        yield


# --- warnings


def _deeper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call it from a frame of another file, to which its warning then points."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return call


@fault("AMP-REGION-058")
def deprecated_scaler_warns_of_another_file() -> Iterator[None]:
    """The deprecation of torch.cuda.amp.GradScaler points below its caller."""
    kind = torch.cuda.amp.GradScaler
    with replaced(kind, "__init__", _deeper(kind.__init__)):
        yield


@fault("AMP-REGION-058")
def deprecated_decorator_warns_of_another_file() -> Iterator[None]:
    """The deprecation of torch.cuda.amp.custom_bwd points below its caller."""
    with replaced(torch.cuda.amp, "custom_bwd", _deeper(torch.cuda.amp.custom_bwd)):
        yield
