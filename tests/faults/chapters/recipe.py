"""Faults that whole training programs feel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced
from tests.faults.cast_rules import cast, following


@fault("AMP-RECIPE-002", "AMP-RECIPE-017")
def weight_cache_outlives_its_region() -> Iterator[None]:
    """Leaving the outermost region keeps the cached weights, so training goes on with stale ones."""
    with edited(torch.autocast.__exit__, "torch.clear_autocast_cache()", "pass"):
        yield


@fault("AMP-RECIPE-014")
def reciprocal_is_inexact() -> Iterator[None]:
    """Gradients are unscaled by a reciprocal that is one part in a million off."""
    with edited(
        torch.amp.GradScaler.unscale_,
        "self._scale.double().reciprocal()",
        "(self._scale.double().reciprocal() * 1.000001)",
    ):
        yield


@fault("AMP-RECIPE-007")
def backoff_is_too_strong() -> Iterator[None]:
    """The scale is quartered in place of halved."""
    with edited(torch.amp.GradScaler.update, "self._backoff_factor,", "self._backoff_factor * 0.5,"):
        yield


@fault("AMP-RECIPE-039")
def tracker_is_not_resumed() -> Iterator[None]:
    """load_state_dict starts the growth count anew."""
    with edited(torch.amp.GradScaler.load_state_dict, 'cast(int, state_dict["_growth_tracker"])', "0"):
        yield


@fault("AMP-RECIPE-025")
def overflow_of_one_skips_none() -> Iterator[None]:
    """The check for inf forgets what the last tensor of a list holds."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def forgetful(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients[:-1], found, inverse)
        gradients[-1].mul_(inverse)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", forgetful):
        yield


@fault("AMP-RECIPE-018")
def step_does_not_unscale() -> Iterator[None]:
    """scaler.step looks for inf but leaves the gradients scaled."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def checking(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, torch.ones_like(inverse))

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", checking):
        yield


@fault("AMP-RECIPE-015")
def disabled_scaler_scales() -> Iterator[None]:
    """A disabled scaler multiplies the loss by two."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        return right(self, outputs) if self._enabled else outputs * 2

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-RECIPE-003")
def old_spelling_drops_its_type() -> Iterator[None]:
    """torch.cpu.amp.autocast ignores dtype."""
    right = torch.cpu.amp.autocast.__init__

    def init(self: Any, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        right(self, enabled=enabled, cache_enabled=cache_enabled)

    with replaced(torch.cpu.amp.autocast, "__init__", init):
        yield


@fault("AMP-RECIPE-004", "AMP-RECIPE-005")
def decorator_does_nothing() -> Iterator[None]:
    """A function decorated with autocast runs outside any region."""
    with replaced(torch.autocast, "__call__", lambda self, function: function):
        yield


@fault("AMP-RECIPE-023")
def scale_shrinks_with_every_call() -> Iterator[None]:
    """scale() multiplies by less the second time in an iteration."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        result = right(self, outputs)
        if isinstance(result, torch.Tensor) and self._enabled:
            count = self.__dict__["_calls"] = self.__dict__.get("_calls", 0) + 1
            result = result / count
        return result

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        self.__dict__["_calls"] = 0
        whole(self, new_scale)

    whole = torch.amp.GradScaler.update
    with replaced(torch.amp.GradScaler, "scale", scale), replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-RECIPE-019", "AMP-RECIPE-002")
def products_run_in_float32() -> Iterator[None]:
    """linear multiplies in float32 on rounded operands and rounds its result."""

    def wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            operands = [None if t is None else t.to(dtype).float() for t in (x, weight, bias)]
            return torch.ops.aten.linear(*operands).to(dtype)

    with kernel("linear", wide, "AutocastCPU"):
        yield


@fault("AMP-RECIPE-020")
def single_outputs_have_half_a_gradient() -> Iterator[None]:
    """In a region the weight of a linear layer with one output gets half of its gradient."""

    def run(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
        lowered = cast(named, amp_dtype)
        weight = lowered["weight"]
        if weight.shape[0] == 1:
            half = weight / 2
            lowered["weight"] = half + half.detach()
        return op(**lowered)

    with following("linear", run, "cpu"):
        yield
