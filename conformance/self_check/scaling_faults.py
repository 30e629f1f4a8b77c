"""Faults of loss scaling and of what stands around it: the scale, unscaling, skipped steps, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .planting import replaced
from .registry import fault

Scaler = torch.amp.GradScaler


@fault("AMP-SCALE-060")
def scale_is_not_halved(device_type: str) -> Iterator[None]:
    """The loss scale stays as it is after a skipped step."""
    update = torch._amp_update_scale_

    def changed(scale: Any, tracker: Any, found_inf: Any, growth: float, backoff: float, interval: int) -> Any:
        return update(scale, tracker, found_inf, growth, 1.0, interval)

    with replaced(torch, "_amp_update_scale_", changed):
        yield


@fault("AMP-SCALE-170")
def scale_does_not_grow(device_type: str) -> Iterator[None]:
    """The loss scale stays as it is after growth_interval good steps."""
    update = torch._amp_update_scale_

    def changed(scale: Any, tracker: Any, found_inf: Any, growth: float, backoff: float, interval: int) -> Any:
        return update(scale, tracker, found_inf, 1.0, backoff, interval)

    with replaced(torch, "_amp_update_scale_", changed):
        yield


@fault("AMP-SCALE-043")
def infinities_are_not_found(device_type: str) -> Iterator[None]:
    """unscale_ sets no flag where a gradient is infinite or NaN."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    def changed(gradients: Any, found_inf: Any, inverse_scale: Any) -> None:
        unscale(gradients, torch.zeros_like(found_inf), inverse_scale)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", changed):
        yield


@fault("AMP-OPTIMIZER-010")
def skipped_step_is_taken(device_type: str) -> Iterator[None]:
    """step() calls the optimizer although a gradient is infinite."""

    def changed(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    with replaced(Scaler, "_maybe_opt_step", changed):
        yield


@fault("AMP-SCALE-080")
def unscale_twice_is_allowed(device_type: str) -> Iterator[None]:
    """A second unscale_ in one iteration raises no error."""
    unscale = Scaler.unscale_

    def changed(self: Any, optimizer: Any) -> None:
        if not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            unscale(self, optimizer)

    with replaced(Scaler, "unscale_", changed):
        yield


@fault("AMP-CLIP-001", "AMP-CLIP-002")
def gradients_are_clipped_before_they_are_unscaled(device_type: str) -> Iterator[None]:
    """unscale_ leaves its work to step, so that gradients are clipped while they are scaled."""
    unscale, step = Scaler.unscale_, Scaler.step

    def later(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(Scaler, "unscale_", unscale):
            return step(self, optimizer, *args, **kwargs)

    with replaced(Scaler, "unscale_", lambda self, optimizer: None), replaced(Scaler, "step", later):
        yield


@fault("AMP-CLIP-003")
def long_gradients_are_not_clipped(device_type: str) -> Iterator[None]:
    """clip_grad_norm_ returns the norm and leaves the gradients as they are."""
    clip = torch.nn.utils.clip_grad_norm_

    def changed(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        return clip(parameters, float("inf"), *args, **kwargs)

    with replaced(torch.nn.utils, "clip_grad_norm_", changed):
        yield


@fault("AMP-SCALE-091", "AMP-RECIPE-039")
def growth_tracker_is_not_restored(device_type: str) -> Iterator[None]:
    """load_state_dict starts the count of good steps at 0."""
    load = Scaler.load_state_dict

    def changed(self: Any, state: dict[str, Any]) -> None:
        load(self, {**state, "_growth_tracker": 0} if state else state)

    with replaced(Scaler, "load_state_dict", changed):
        yield


@fault("AMP-MEMORY-011")
def scaler_keeps_the_gradients(device_type: str) -> Iterator[None]:
    """A GradScaler holds the gradients that it unscaled last."""
    unscale = Scaler._unscale_grads_

    def changed(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._kept = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        return unscale(self, optimizer, *args, **kwargs)

    with replaced(Scaler, "_unscale_grads_", changed):
        yield
