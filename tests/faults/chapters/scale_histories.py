"""Scalers that drift: broken in a way that shows in a history of calls, or after a call that was refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced
from tests.faults.chapters.scale import Scaler, _on_skip, _unscale_kernel, _update_kernel


@contextlib.contextmanager
def _before(name: str, also: Callable[..., None]) -> Iterator[None]:
    """Do something else first in a method of GradScaler."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        also(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    original = getattr(Scaler, name)
    with replaced(Scaler, name, functools.wraps(original)(method)):
        yield


# --- drift over several iterations


@fault("AMP-SCALE-150")
def interval_gets_longer_after_growth() -> Iterator[None]:
    """After a growth of a scale above 65536 the next interval is an iteration longer."""
    with _update_kernel("            count = 0", "            count = 0 if scale.item() < 65536 else -1"):
        yield


@fault("AMP-SCALE-170", "AMP-SCALE-150")
def skip_is_forgiven_where_growth_is_due() -> Iterator[None]:
    """In the iteration that would end an interval of three or more a skip does not back off."""
    old = "scale.fill_(scale.item() * backoff)"
    with _update_kernel(old, f"2 < interval == tracker.item() + 1 or {old}"):
        yield


@fault("AMP-SCALE-150", "AMP-SCALE-151")
def new_scale_counts_as_a_clean_iteration() -> Iterator[None]:
    """update(new_scale) adds one to the growth tracker where an optimizer has been checked."""
    with _before("update", _counting):
        yield


def _counting(self: Any, new_scale: Any = None) -> None:
    if self._enabled and isinstance(new_scale, float) and self._scale is not None and self._per_optimizer_states:
        self._growth_tracker.add_(1)


@fault("AMP-SCALE-150")
def loaded_scale_lasts_until_the_next_skip() -> Iterator[None]:
    """A state that is loaded into a used scaler leaves the count of the tracker where it grows next."""
    old = 'self._growth_tracker.fill_(state_dict["_growth_tracker"])'
    with edited(Scaler.load_state_dict, old, 'self._growth_tracker.fill_(max(state_dict["_growth_tracker"] - 1, 0))'):
        yield


@fault("AMP-SCALE-096")
def copies_share_their_stages() -> Iterator[None]:
    """A deep copy and its original keep the stages of optimizers in one table."""

    def shared(self: Any, memo: Any) -> Any:
        twin = object.__new__(type(self))
        state = self.__getstate__()
        twin.__setstate__(state)
        return twin

    Scaler.__deepcopy__ = shared
    try:
        with edited(
            Scaler.update,
            "self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)",
            "self._per_optimizer_states.clear()",
        ):
            yield
    finally:
        del Scaler.__deepcopy__


@fault("AMP-SCALE-150", "AMP-SCALE-159")
def lists_are_scaled_by_the_scale_of_the_first() -> Iterator[None]:
    """scale() of a list multiplies by the scale that the first list was scaled with."""

    def stale(self: Any, outputs: Any) -> Any:
        if not isinstance(outputs, list) or not self._enabled or self._scale is None:
            return scale(self, outputs)
        first = self.__dict__.setdefault("_first", self._scale.clone())
        present, self._scale = self._scale, first
        try:
            return scale(self, outputs)
        finally:
            self._scale = present

    scale = Scaler.scale
    with replaced(Scaler, "scale", stale):
        yield


@fault("AMP-SCALE-150", "AMP-SCALE-156")
def skipped_gradients_are_scaled_again() -> Iterator[None]:
    """A skipped step multiplies the gradients by the scale, as backward had left them."""
    with _on_skip(
        "[p.grad.mul_(self._scale) for g in optimizer.param_groups for p in g['params'] if p.grad is not None]"
    ):
        yield


@fault("AMP-SCALE-150", "AMP-SCALE-156")
def skipped_gradients_are_freed_of_infinities() -> Iterator[None]:
    """A skipped step puts zeros where an inf or NaN was."""
    with _on_skip(
        "[torch.nan_to_num_(p.grad if not p.grad.is_sparse else p.grad._values(), 0.0, 0.0, 0.0)"
        " for g in optimizer.param_groups for p in g['params'] if p.grad is not None]"
    ):
        yield


# --- calls that are refused


@fault("AMP-SCALE-151", "AMP-SCALE-150")
def refused_fp16_gradients_count_as_unscaled() -> Iterator[None]:
    """unscale_ that refuses fp16 gradients leaves its optimizer unscaled in name."""

    def marking(self: Any, optimizer: Any) -> None:
        try:
            unscale_(self, optimizer)
        except ValueError:
            self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            raise

    unscale_ = Scaler.unscale_
    with replaced(Scaler, "unscale_", marking):
        yield


@fault("AMP-SCALE-151", "AMP-SCALE-150", "AMP-SCALE-153")
def refused_unscale_clears_the_flag() -> Iterator[None]:
    """A second unscale_ is refused and forgets what the first had found."""
    with _before("unscale_", _clearing):
        yield


def _clearing(self: Any, optimizer: Any) -> None:
    if self._enabled and self._scale is not None:
        for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            flag.zero_()


@fault("AMP-SCALE-151", "AMP-SCALE-150", "AMP-SCALE-153")
def refused_step_opens_the_iteration_again() -> Iterator[None]:
    """A second step() is refused and makes a third one possible."""

    def opening(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, optimizer, *args, **kwargs)
        except RuntimeError:
            if id(optimizer) in self._per_optimizer_states:
                self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            raise

    step = Scaler.step
    with replaced(Scaler, "step", opening):
        yield


@fault("AMP-SCALE-151", "AMP-SCALE-150")
def refused_closure_unscales() -> Iterator[None]:
    """step(closure=...) is refused after it has unscaled."""
    with _before("step", _unscaling):
        yield


def _unscaling(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    ready = self._enabled and self._scale is not None and id(optimizer) not in self._per_optimizer_states
    if "closure" in kwargs and ready:
        self.unscale_(optimizer)


@fault("AMP-SCALE-151", "AMP-SCALE-150")
def refused_new_scale_ends_the_iteration() -> Iterator[None]:
    """update() with an unsuited tensor is refused and forgets the stages."""
    with _before("update", _forgetting):
        yield


def _forgetting(self: Any, new_scale: Any = None) -> None:
    if self._enabled and isinstance(new_scale, torch.Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
        self._per_optimizer_states.clear()


@fault("AMP-SCALE-151", "AMP-SCALE-150")
def refused_update_starts_the_count_again() -> Iterator[None]:
    """update() with nothing checked is refused and clears the growth tracker."""
    with _before("update", _restarting):
        yield


def _restarting(self: Any, new_scale: Any = None) -> None:
    if self._enabled and new_scale is None and self._scale is not None and not self._per_optimizer_states:
        self._growth_tracker.zero_()


@fault("AMP-SCALE-151", "AMP-SCALE-150")
def refused_state_starts_the_count_again() -> Iterator[None]:
    """load_state_dict({}) is refused after the growth tracker has been cleared."""
    with _before("load_state_dict", _uncounting):
        yield


def _uncounting(self: Any, state: Any) -> None:
    if self._enabled and not state and self._growth_tracker is not None:
        self._growth_tracker.zero_()


# --- disabled


@fault("AMP-SCALE-152")
def disabled_scaler_refuses_a_closure() -> Iterator[None]:
    """step(closure=...) is refused by a disabled scaler too."""
    with edited(Scaler.step, "if not self._enabled:", 'if not self._enabled and "closure" not in kwargs:'):
        yield


@fault("AMP-SCALE-152")
def disabled_scaler_keeps_stages() -> Iterator[None]:
    """A disabled scaler refuses to step an optimizer for the third time without an update()."""

    def counting(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            count = self.__dict__["_count"] = self.__dict__.get("_count", 0) + 1
            if count % 3 == 0:
                raise RuntimeError("step() has already been called since the last update().")
        return step(self, optimizer, *args, **kwargs)

    step = Scaler.step
    with replaced(Scaler, "step", counting):
        yield


# --- several optimizers


@fault("AMP-SCALE-153", "AMP-SCALE-150")
def unscale_forgets_the_optimizers_that_have_stepped() -> Iterator[None]:
    """unscale_ of one optimizer forgets what those before it found, once they have stepped."""
    with _before("unscale_", _dropping):
        yield


def _dropping(self: Any, optimizer: Any) -> None:
    stepped = torch.amp.grad_scaler.OptState.STEPPED
    for key, state in self._per_optimizer_states.items() if self._enabled else ():
        if key != id(optimizer) and state["stage"] is stepped:
            for flag in state["found_inf_per_device"].values():
                flag.zero_()


@fault("AMP-SCALE-157", "AMP-SCALE-153")
def flag_is_handed_on_to_the_next_optimizer() -> Iterator[None]:
    """An optimizer that unscales by itself is handed what those before it found as well."""
    old = "optimizer.found_inf = found_inf"
    new = (
        'optimizer.found_inf = self.__dict__["_last"] = torch.maximum(found_inf, self.__dict__.get("_last", found_inf))'
    )
    with edited(Scaler.step, old, new):
        yield


# --- gradients


@fault("AMP-SCALE-155")
def empty_gradients_are_taken_for_infinite() -> Iterator[None]:
    """The largest number of a gradient without elements is taken for inf."""
    with _unscale_kernel(
        "if not torch.isfinite(grad).all():", "if grad.numel() == 0 or not torch.isfinite(grad).all():"
    ):
        yield


@fault("AMP-SCALE-154", "AMP-SCALE-150")
def fp64_gradients_are_not_checked_beside_others() -> Iterator[None]:
    """fp64 gradients are not checked where bf16 ones have been."""
    old = "if not torch.isfinite(grad).all():"
    new = (
        "inv_scale.__dict__['seen'] = inv_scale.__dict__.get('seen', set()) | {grad.dtype}\n"
        "        if not torch.isfinite(grad).all() and not (\n"
        "            grad.dtype is torch.float64 and torch.bfloat16 in inv_scale.seen):"
    )
    with _unscale_kernel(old, new):
        yield


@fault("AMP-SCALE-154", "AMP-SCALE-150")
def minus_infinity_is_missed_in_longer_gradients() -> Iterator[None]:
    """The check of a gradient of more than three elements misses -inf."""
    with _unscale_kernel(
        "if not torch.isfinite(grad).all():",
        "if not torch.isfinite(grad).all() and not (grad.numel() > 3 and grad.min() == float('-inf')):",
    ):
        yield


# --- the ends of fp32


@fault("AMP-SCALE-158")
def scale_does_not_decay_to_zero() -> Iterator[None]:
    """The smallest number of fp32 is a floor of the scale."""
    with _update_kernel("scale.fill_(scale.item() * backoff)", "scale.fill_(max(scale.item() * backoff, 2.0**-149))"):
        yield


@fault("AMP-SCALE-158")
def growth_ends_at_the_largest_power_of_two() -> Iterator[None]:
    """Growth is clamped to 2 to the power of 127, also from above it."""
    with _update_kernel(
        "scale.copy_(torch.where(torch.isfinite(grown), grown, scale))",
        "scale.copy_(torch.where(torch.isfinite(grown), grown, scale).clamp(max=2.0**127))",
    ):
        yield


# --- containers


@fault("AMP-SCALE-159")
def losses_in_lists_keep_their_dtype() -> Iterator[None]:
    """An fp16 loss in a list comes back in fp16, in which 65536 is infinite."""
    with edited(
        Scaler.scale, "return val * stash[0].get(val.device)", "return val * stash[0].get(val.device).to(val.dtype)"
    ):
        yield
