"""Clipping by the wrong norm, the wrong coefficient or the wrong gradients, or that hides an inf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tests.faults import fault
from tests.faults.breaking import edited, replaced
from tests.faults.cast_rules import cast, following

SCALER = torch.amp.GradScaler
_NORM, _SHRINK = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


@fault("AMP-CLIP-030", "AMP-CLIP-031")
def step_checks_clipped_gradients() -> Iterator[None]:
    """step() looks for inf in the gradients as clipping left them."""
    with edited(
        SCALER.step,
        'if len(optimizer_state["found_inf_per_device"]) == 0:',
        'if optimizer_state["stage"] is OptState.UNSCALED:\n        self._check_inf_per_device(optimizer)\n'
        '    if len(optimizer_state["found_inf_per_device"]) == 0:',
    ):
        yield


@fault("AMP-CLIP-001", "AMP-CLIP-002")
def unscale_does_nothing() -> Iterator[None]:
    """unscale_ checks the gradients and leaves them scaled; step() goes by that."""
    with edited(
        SCALER.unscale_, "optimizer, inv_scale, found_inf, False", "optimizer, inv_scale * 0 + 1, found_inf, False"
    ):
        yield


@fault("AMP-CLIP-070")
def step_unscales_again() -> Iterator[None]:
    """step() unscales although unscale_ was called."""
    with edited(
        SCALER.step,
        'if optimizer_state["stage"] is OptState.READY:\n        self.unscale_(optimizer)',
        'if True:\n        optimizer_state["stage"] = OptState.READY\n        self.unscale_(optimizer)',
    ):
        yield


@fault("AMP-CLIP-040")
def unscale_reaches_other_optimizers() -> Iterator[None]:
    """unscale_ divides the gradients of every optimizer that there is."""
    original = SCALER.unscale_
    seen: list[torch.optim.Optimizer] = []
    created = torch.optim.Optimizer.__init__

    def create(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        created(self, *args, **kwargs)
        seen.append(self)

    def unscale(self: Any, optimizer: torch.optim.Optimizer) -> None:
        original(self, optimizer)
        for other in seen:
            if other is not optimizer:
                for parameter in (each for group in other.param_groups for each in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad /= self._scale

    with replaced(torch.optim.Optimizer, "__init__", create), replaced(SCALER, "unscale_", unscale):
        yield


@fault("AMP-CLIP-004")
def short_gradients_grow() -> Iterator[None]:
    """The coefficient is not clamped to 1."""
    with edited(_SHRINK, "torch.clamp(clip_coef, max=1.0)", "clip_coef"):
        yield


@fault("AMP-CLIP-005")
def another_epsilon() -> Iterator[None]:
    """The norm is increased by 1e-8 where 1e-6 is documented."""
    with edited(_SHRINK, "(total_norm + 1e-6)", "(total_norm + 1e-8)"):
        yield


@fault("AMP-CLIP-002", "AMP-CLIP-003")
def always_the_2_norm() -> Iterator[None]:
    """clip_grad_norm_ ignores norm_type."""
    with edited(clip_grad.clip_grad_norm_, "grads, norm_type,", "grads, 2.0,"):
        yield


@fault("AMP-CLIP-002")
def norm_after_clipping() -> Iterator[None]:
    """clip_grad_norm_ returns the norm of the clipped gradients."""
    with edited(clip_grad.clip_grad_norm_, "return total_norm", "return total_norm.clamp(max=max_norm)"):
        yield


@fault("AMP-CLIP-002", "AMP-CLIP-003")
def norms_are_combined_by_the_2_norm() -> Iterator[None]:
    """The norms of the tensors are combined by the 2-norm, whatever norm was asked for."""
    with edited(_NORM, "for norm in norms]), norm_type", "for norm in norms]), 2.0"):
        yield


@fault("AMP-CLIP-010")
def only_a_hundred_tensors() -> Iterator[None]:
    """The norm leaves out what comes after the first hundred tensors."""
    with edited(
        _NORM, "torch._foreach_norm(device_tensors, norm_type)", "torch._foreach_norm(device_tensors[:100], norm_type)"
    ):
        yield


@fault("AMP-CLIP-002", "AMP-CLIP-003")
def norm_in_16_bit() -> Iterator[None]:
    """The for-loop takes each norm of gradients rounded to bf16."""
    with edited(_NORM, "vector_norm(g, norm_type)", "vector_norm(g.bfloat16().float(), norm_type)"):
        yield


@fault("AMP-CLIP-006")
def gradients_are_replaced() -> Iterator[None]:
    """The for-loop puts new tensors in the place of the gradients."""
    with edited(
        _SHRINK,
        "g.mul_(clip_coef_clamped_device)",
        "[setattr(p, 'grad', p.grad * clip_coef_clamped) for p in parameters if p.grad is g]",
    ):
        yield


@fault("AMP-CLIP-032")
def inf_is_no_error() -> Iterator[None]:
    """error_if_nonfinite raises for NaN only."""
    with edited(_NORM, "torch.logical_or(total_norm.isnan(), total_norm.isinf())", "total_norm.isnan()"):
        yield


@fault("AMP-CLIP-034")
def bad_norms_become_zero() -> Iterator[None]:
    """A coefficient of NaN is taken for zero."""
    with edited(_SHRINK, "torch.clamp(clip_coef, max=1.0)", "torch.clamp(clip_coef, max=1.0).nan_to_num(0.0)"):
        yield


@fault("AMP-CLIP-051")
def given_norm_is_ignored() -> Iterator[None]:
    """clip_grads_with_norm_ computes the norm itself."""
    with edited(_SHRINK, "max_norm / (total_norm", "max_norm / (_get_total_norm(grads)"):
        yield


@fault("AMP-CLIP-060")
def only_large_values_are_clipped() -> Iterator[None]:
    """clip_grad_value_ does not clamp from below."""
    with edited(clip_grad.clip_grad_value_, "clamp_(min=-clip_value, max=clip_value)", "clamp_(max=clip_value)"):
        yield


@fault("AMP-CLIP-074")
def clipping_waits_for_the_norm() -> Iterator[None]:
    """Clipping reads the coefficient back to the host."""
    with edited(_SHRINK, "torch.clamp(clip_coef, max=1.0)", "torch.tensor(min(clip_coef.item(), 1.0))"):
        yield


@fault("AMP-CLIP-080")
def old_spelling_is_silent() -> Iterator[None]:
    """clip_grad_norm no longer warns."""
    with replaced(torch.nn.utils, "clip_grad_norm", torch.nn.utils.clip_grad_norm_):
        yield


@fault("AMP-CLIP-092")
def complex_gradients_count_by_their_real_part() -> Iterator[None]:
    """The norm of a complex gradient is that of its real part."""
    original = torch.linalg.vector_norm
    several = torch._foreach_norm

    def norm(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(tensor.real if tensor.is_complex() else tensor, *args, **kwargs)

    def norms(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return several([tensor.real if tensor.is_complex() else tensor for tensor in tensors], *args, **kwargs)

    with replaced(torch.linalg, "vector_norm", norm), replaced(torch, "_foreach_norm", norms):
        yield


@fault("AMP-CLIP-093")
def norms_are_computed_in_fp16() -> Iterator[None]:
    """The norm of 16-bit gradients is rounded to fp16."""
    with edited(
        _NORM,
        "total_norm = torch.linalg.vector_norm(",
        "norms = [norm.half().to(norm.dtype) for norm in norms]\n    total_norm = torch.linalg.vector_norm(",
    ):
        yield


@fault("AMP-CLIP-094")
def refused_gradients_are_clipped_first() -> Iterator[None]:
    """clip_grad_value_ halves every dense gradient before it clips."""
    with edited(
        clip_grad.clip_grad_value_,
        "clip_value = float(clip_value)",
        "clip_value = float(clip_value)\n    parameters = list(parameters)\n"
        "    [p.grad.mul_(0.5) for p in parameters if p.grad is not None and p.grad.layout is torch.strided "
        "and p.grad.is_contiguous()]",
    ):
        yield


@fault("AMP-CLIP-007")
def generators_are_exhausted_by_the_norm() -> Iterator[None]:
    """clip_grad_norm_ goes through an iterator twice: the second time there is nothing left to shrink."""
    with edited(
        clip_grad.clip_grad_norm_,
        "parameters = list(parameters)\n        if is_generator and len(parameters) == 0:",
        "if False:",
    ):
        yield


@fault("AMP-CLIP-033")
def skips_after_unscaling_count_as_steps() -> Iterator[None]:
    """A skip by what unscale_ found advances the step counters, as a skip by step() does not."""
    step = SCALER.step

    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        flags = self._found_inf_per_device(optimizer).values()
        if any(flag.item() for flag in flags):
            for state in optimizer.state.values():
                state["step"] += 1
        return step(self, optimizer, *args, **kwargs)

    with replaced(SCALER, "step", stepping):
        yield


@fault("AMP-CLIP-041")
def other_groups_are_clipped_too() -> Iterator[None]:
    """Clipping some parameters of an optimizer shrinks the gradients of all of them."""
    created, clip = torch.optim.Optimizer.__init__, torch.nn.utils.clip_grad_norm_
    seen: list[torch.optim.Optimizer] = []

    def create(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        created(self, *args, **kwargs)
        seen.append(self)

    def clipping(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = set(parameters)
        for optimizer in seen:
            owned = [one for group in optimizer.param_groups for one in group["params"]]
            if given & set(owned):
                return clip(owned, *args, **kwargs)
        return clip(parameters, *args, **kwargs)

    with replaced(torch.optim.Optimizer, "__init__", create), replaced(torch.nn.utils, "clip_grad_norm_", clipping):
        yield


@fault("AMP-CLIP-050")
def clipping_by_a_given_norm_has_no_epsilon() -> Iterator[None]:
    """clip_grads_with_norm_ divides by the bare norm, and clip_grad_norm_ does not."""

    def clipping(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        _SHRINK(parameters, max_norm, total_norm - 1e-6, foreach)

    with replaced(torch.nn.utils, "clip_grads_with_norm_", clipping):
        yield


@fault("AMP-CLIP-071")
def weight_gradients_leave_out_the_last_row() -> Iterator[None]:
    """In a region the gradient of a linear layer's weight leaves out the last row of the batch."""

    def run(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
        lowered = cast(named, amp_dtype)
        rows = lowered["input"]
        if rows.dim() != 2 or len(rows) < 2:
            return op(**lowered)
        last = {**lowered, "input": rows[-1:], "weight": lowered["weight"].detach()}
        return torch.cat([op(**{**lowered, "input": rows[:-1]}), op(**last)])

    with following("linear", run, "cpu"):
        yield


@fault("AMP-CLIP-072")
def later_losses_of_an_iteration_are_scaled_again() -> Iterator[None]:
    """Each further loss before update() is scaled by twice the scale of the one before."""
    scale, update = SCALER.scale, SCALER.update

    def scaling(self: Any, outputs: Any) -> Any:
        self._losses = getattr(self, "_losses", 0) + 1
        scaled = scale(self, outputs)
        return scaled * 2 ** (self._losses - 1) if isinstance(outputs, torch.Tensor) else scaled

    def updating(self: Any, *args: Any, **kwargs: Any) -> None:
        self._losses = 0
        update(self, *args, **kwargs)

    with replaced(SCALER, "scale", scaling), replaced(SCALER, "update", updating):
        yield
