"""Broken loss scaling: GradScaler, its two kernels, the optimizers under it, and gradient clipping."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

Scaler = torch.amp.GradScaler

# The two kernels of GradScaler in Python, as ATen/native/AmpKernels.cpp has them: what the faults below break.


def _update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    if found_inf.item() != 0:
        scale.fill_(scale.item() * backoff)
        tracker.zero_()
    else:
        count = int(tracker.item()) + 1
        if count == interval:
            grown = torch.tensor(scale.item() * growth, dtype=torch.float32)
            scale.copy_(torch.where(torch.isfinite(grown), grown, scale))
            count = 0
        tracker.fill_(count)
    return scale


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    for grad in grads:
        if not torch.isfinite(grad).all():
            found_inf.fill_(1.0)
        grad.mul_(inv_scale)


@contextlib.contextmanager
def _update_kernel(old: str, new: str) -> Iterator[None]:
    with edited(_update_scale, old, new), kernel("_amp_update_scale_", _update_scale, "CPU"):
        yield


@contextlib.contextmanager
def _unscale_kernel(old: str, new: str) -> Iterator[None]:
    with (
        edited(_unscale, old, new),
        kernel("_amp_foreach_non_finite_check_and_unscale_", _unscale, "CPU"),
    ):
        yield


@contextlib.contextmanager
def _defaults(function: Any, **changed: Any) -> Iterator[None]:
    before = function.__defaults__
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(before) :]
    function.__defaults__ = tuple(changed.get(name, value) for name, value in zip(names, before, strict=True))
    try:
        yield
    finally:
        function.__defaults__ = before


# --- the update of the scale


@fault("AMP-SCALE-060", "AMP-SCALE-142")
def scale_is_not_backed_off() -> Iterator[None]:
    """A skipped step leaves the scale as it is; only the count starts again."""
    with _update_kernel("scale.item() * backoff", "scale.item()"):
        yield


@fault("AMP-SCALE-060", "AMP-SCALE-142")
def scale_is_always_halved() -> Iterator[None]:
    """The backoff factor is taken for a half, whatever it is set to."""
    with _update_kernel("scale.item() * backoff", "scale.item() * 0.5"):
        yield


@fault("AMP-SCALE-170", "AMP-SCALE-142")
def scale_grows_one_iteration_early() -> Iterator[None]:
    """The scale grows after one clean iteration less than the growth interval."""
    with _update_kernel("count == interval", "count == max(interval - 1, 1)"):
        yield


@fault("AMP-SCALE-170", "AMP-SCALE-142")
def scale_grows_one_iteration_late() -> Iterator[None]:
    """The scale grows after one clean iteration more than the growth interval."""
    with _update_kernel("count == interval", "count > interval"):
        yield


@fault("AMP-SCALE-062", "AMP-SCALE-170", "AMP-SCALE-142")
def tracker_survives_a_skip() -> Iterator[None]:
    """A skipped step does not start the count of clean iterations again."""
    with _update_kernel("tracker.zero_()", "pass"):
        yield


@fault("AMP-SCALE-170", "AMP-SCALE-142")
def tracker_is_one_after_growth() -> Iterator[None]:
    """The iteration in which the scale grows is counted for the next interval as well."""
    with _update_kernel("count = 0", "count = 1"):
        yield


@fault("AMP-SCALE-064", "AMP-SCALE-142")
def scale_grows_to_infinity() -> Iterator[None]:
    """Growth past the range of fp32 makes the scale infinite."""
    with _update_kernel("torch.where(torch.isfinite(grown), grown, scale)", "grown"):
        yield


@fault("AMP-SCALE-064", "AMP-SCALE-142")
def tracker_stands_where_growth_overflows() -> Iterator[None]:
    """Where growth would be infinite the count is not started again."""
    with _update_kernel("count = 0", "count = 0 if torch.isfinite(grown) else count"):
        yield


@fault("AMP-SCALE-065", "AMP-SCALE-142")
def scale_has_a_floor_of_one() -> Iterator[None]:
    """The scale is never backed off below 1."""
    with _update_kernel("scale.item() * backoff", "max(scale.item() * backoff, 1.0)"):
        yield


@fault("AMP-SCALE-142")
def growth_factor_is_rounded_to_fp32() -> Iterator[None]:
    """The scale is multiplied by the growth factor's fp32 value: up to one unit in the last place off."""
    with _update_kernel("torch.tensor(scale.item() * growth, dtype=torch.float32)", "scale * torch.tensor(growth)"):
        yield


@fault("AMP-OPTIMIZER-050")
def two_skips_do_not_back_off() -> Iterator[None]:
    """The combined flag is compared with 1: where two optimizers skipped it is 2, and nothing backs off."""
    with _update_kernel("found_inf.item() != 0", "found_inf.item() == 1"):
        yield


@fault("AMP-OPTIMIZER-050")
def scale_backs_off_once_for_each_skip() -> Iterator[None]:
    """The scale is multiplied by the backoff factor once for every optimizer that skipped."""
    with _update_kernel("scale.item() * backoff", "scale.item() * backoff ** found_inf.item()"):
        yield


@fault("AMP-OPTIMIZER-050", "AMP-SCALE-114")
def update_looks_at_the_first_optimizer_only() -> Iterator[None]:
    """update() takes the flag of the optimizer that was checked first."""
    with edited(Scaler.update, "range(1, len(found_infs))", "range(0)"):
        yield


@fault("AMP-OPTIMIZER-050", "AMP-SCALE-114")
def update_looks_at_the_last_optimizer_only() -> Iterator[None]:
    """update() takes the flag of the optimizer that was checked last."""
    with edited(Scaler.update, "found_inf_combined += found_infs[i]", "found_inf_combined = found_infs[i]"):
        yield


@fault("AMP-SCALE-070")
def new_scale_is_aliased() -> Iterator[None]:
    """The tensor given to update() becomes the scale itself."""
    with edited(Scaler.update, "self._scale.copy_(new_scale)", "self._scale = new_scale"):
        yield


@fault("AMP-SCALE-068")
def new_scale_is_held_at_one() -> Iterator[None]:
    """A float below 1 that is given to update() becomes 1."""
    with edited(Scaler.update, "self._scale.fill_(new_scale)", "self._scale.fill_(max(new_scale, 1.0))"):
        yield


@fault("AMP-SCALE-072")
def new_scale_does_not_end_the_iteration() -> Iterator[None]:
    """update(new_scale) keeps what the optimizers recorded in this iteration."""
    old = "self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)"
    new = f"self._per_optimizer_states = self._per_optimizer_states\n    if new_scale is None:\n        {old}"
    with edited(Scaler.update, old, new):
        yield


@fault("AMP-SCALE-072")
def new_scale_resets_the_tracker() -> Iterator[None]:
    """Setting the scale starts the count of clean iterations again."""
    with edited(Scaler.update, "self._scale.fill_(new_scale)", "self._scale.fill_(new_scale); _growth_tracker.zero_()"):
        yield


@fault("AMP-SCALE-086")
def update_resets_stages_but_keeps_flags() -> Iterator[None]:
    """After update() an old inf still counts for an optimizer that is not used in the next iteration."""
    old = "self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)"
    new = "[state.update(stage=OptState.READY) for state in self._per_optimizer_states.values()]"
    with edited(Scaler.update, old, new):
        yield


@fault("AMP-SCALE-066")
def backoff_setter_is_ignored() -> Iterator[None]:
    """set_backoff_factor() changes nothing."""
    with edited(Scaler.set_backoff_factor, "self._backoff_factor = new_factor", "pass"):
        yield


@fault("AMP-SCALE-066")
def growth_interval_is_rounded_to_even() -> Iterator[None]:
    """set_growth_interval() rounds the interval up to an even number."""
    with edited(Scaler.set_growth_interval, "= new_interval", "= new_interval + new_interval % 2"):
        yield


# --- settings and state


@fault("AMP-SCALE-001", "AMP-API-010")
def initial_scale_is_half() -> Iterator[None]:
    """A scaler that is told nothing starts at 32768."""
    with _defaults(Scaler.__init__, init_scale=2.0**15):
        yield


@fault("AMP-SCALE-002", "AMP-API-010")
def growth_interval_is_1000() -> Iterator[None]:
    """A scaler that is told nothing grows after 1000 clean iterations."""
    with _defaults(Scaler.__init__, growth_interval=1000):
        yield


@fault("AMP-SCALE-090")
def scale_is_stale_after_the_first_use() -> Iterator[None]:
    """get_scale() goes on answering with the initial scale."""
    with edited(Scaler.get_scale, "cast(float, scale.item())", "self._init_scale"):
        yield


@fault("AMP-SCALE-090")
def state_lacks_the_tracker() -> Iterator[None]:
    """state_dict() leaves the growth tracker out."""
    with edited(Scaler.state_dict, '"_growth_tracker": self._get_growth_tracker(),', ""):
        yield


@fault("AMP-SCALE-090", "AMP-SCALE-150")
def state_holds_the_initial_tracker() -> Iterator[None]:
    """state_dict() holds the growth tracker that the scaler started with."""
    with edited(Scaler.state_dict, "self._get_growth_tracker()", "self._init_growth_tracker"):
        yield


@fault("AMP-SCALE-091")
def loading_leaves_the_tracker_of_a_used_scaler() -> Iterator[None]:
    """load_state_dict() into a scaler in use forgets the growth tracker."""
    with edited(Scaler.load_state_dict, 'self._growth_tracker.fill_(state_dict["_growth_tracker"])', "pass"):
        yield


@fault("AMP-SCALE-092", "AMP-SCALE-150")
def loading_leaves_the_tracker_of_a_new_scaler() -> Iterator[None]:
    """load_state_dict() into a new scaler starts the count at zero."""
    with edited(Scaler.load_state_dict, 'cast(int, state_dict["_growth_tracker"])', "0"):
        yield


@fault("AMP-SCALE-091", "AMP-SCALE-092")
def loading_leaves_the_interval() -> Iterator[None]:
    """load_state_dict() keeps the scaler's own growth interval."""
    with edited(Scaler.load_state_dict, 'cast(int, state_dict["growth_interval"])', "self._growth_interval"):
        yield


@fault("AMP-SCALE-095")
def pickling_restarts_the_scale() -> Iterator[None]:
    """A pickled scaler starts again from its initial scale."""
    with edited(Scaler.__getstate__, 'state["_init_scale"] = self.get_scale()', "pass"):
        yield


@fault("AMP-SCALE-130")
def old_spelling_swaps_the_factors() -> Iterator[None]:
    """torch.cpu.amp.GradScaler hands the default backoff factor on in place of the given one."""
    before = torch.cpu.amp.GradScaler.__init__

    def init(self: Any, init_scale: Any = 65536.0, growth_factor: Any = 2.0, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("backoff_factor", None)
        before(self, init_scale, growth_factor, *(0.5, *args[1:])[: len(args)], **kwargs)

    with replaced(torch.cpu.amp.GradScaler, "__init__", init):
        yield


# --- scale()


@fault("AMP-SCALE-010")
def scale_is_cast_to_the_dtype_of_the_loss() -> Iterator[None]:
    """The scale is cast to the dtype of the loss, where 65536 is inf for fp16."""
    with edited(Scaler.scale, "outputs.device, non_blocking=True)", "outputs.device, dtype=outputs.dtype)"):
        yield


@fault("AMP-SCALE-010")
def scale_loses_one_ulp() -> Iterator[None]:
    """The scaled loss is one unit in the last place too large."""
    with edited(Scaler.scale, "outputs.device, non_blocking=True)", "outputs.device) * (1 + 2**-23)"):
        yield


@fault("AMP-SCALE-014")
def lists_are_scaled_in_place() -> Iterator[None]:
    """scale() of a list changes the tensors of the caller."""
    with edited(Scaler.scale, "val * stash[0].get(val.device)", "val.data.mul_(stash[0].get(val.device))"):
        yield


@fault("AMP-SCALE-011")
def tuples_come_back_as_lists() -> Iterator[None]:
    """scale() returns a list for any container."""
    with edited(Scaler.scale, "type(val)(iterable)", "list(iterable)"):
        yield


@fault("AMP-SCALE-100")
def disabled_scaler_returns_a_copy() -> Iterator[None]:
    """A disabled scaler's scale() multiplies a tensor by 1 in place of handing it through."""
    with edited(
        Scaler.scale, "return outputs\n", "return outputs * 1 if isinstance(outputs, torch.Tensor) else outputs\n"
    ):
        yield


# --- unscale_ and its kernel


@fault("AMP-SCALE-043", "AMP-SCALE-141")
def check_sees_no_minus_infinity() -> Iterator[None]:
    """The check compares with +inf and itself: -inf passes."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "((grad == float('inf')) | (grad != grad)).any()"):
        yield


@fault("AMP-SCALE-043", "AMP-SCALE-141")
def check_sees_no_nan() -> Iterator[None]:
    """The check compares magnitudes with inf: NaN passes."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "torch.isinf(grad).any()"):
        yield


@fault("AMP-SCALE-043", "AMP-SCALE-141")
def check_sees_nan_only() -> Iterator[None]:
    """The check sees NaN and lets infinities pass."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "torch.isnan(grad).any()"):
        yield


@fault("AMP-SCALE-047", "AMP-SCALE-141")
def check_adds_up() -> Iterator[None]:
    """The check tests the sum of a gradient, which overflows for large finite ones."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "not torch.isfinite(grad.sum())"):
        yield


@fault("AMP-SCALE-043", "AMP-SCALE-141")
def check_leaves_out_the_tail() -> Iterator[None]:
    """The last elements, beyond a multiple of eight, of a larger gradient are not checked."""
    tail = "not torch.isfinite(grad.flatten()[: grad.numel() - grad.numel() % 8] if grad.numel() > 8 else grad).all()"
    with _unscale_kernel("not torch.isfinite(grad).all()", tail):
        yield


@fault("AMP-SCALE-043")
def check_ends_after_one_chunk() -> Iterator[None]:
    """Only the first 65536 elements of a gradient are checked, the chunk of the multi-tensor kernels."""
    with _unscale_kernel("torch.isfinite(grad)", "torch.isfinite(grad.flatten()[:65536])"):
        yield


@fault("AMP-SCALE-044", "AMP-SCALE-023")
def unscaling_ends_after_110_tensors() -> Iterator[None]:
    """Only the first 110 gradients of a list are checked and unscaled, the list of one multi-tensor launch."""
    with _unscale_kernel("for grad in grads:", "for grad in grads[:110]:"):
        yield


@fault("AMP-SCALE-044", "AMP-SCALE-141")
def flag_is_cleared_by_the_next_gradient() -> Iterator[None]:
    """Each gradient writes the flag anew: only the last one counts."""
    with _unscale_kernel(
        "found_inf.fill_(1.0)", "pass\n        found_inf.fill_(0.0 if torch.isfinite(grad).all() else 1.0)"
    ):
        yield


@fault("AMP-SCALE-044")
def only_the_first_gradient_is_checked() -> Iterator[None]:
    """All gradients are unscaled but only the first one is checked."""
    with _unscale_kernel("if not", "if grad is grads[0] and not"):
        yield


@fault("AMP-SCALE-047")
def beyond_fp16_is_taken_for_infinite() -> Iterator[None]:
    """Finite fp32 gradients beyond 65504 raise the flag."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "not (grad.abs() <= 65504).all()"):
        yield


@fault("AMP-SCALE-140")
def gradients_are_divided() -> Iterator[None]:
    """The kernel divides by the reciprocal of the factor in place of multiplying by it: one unit in the last place."""
    with _unscale_kernel("grad.mul_(inv_scale)", "grad.div_(inv_scale.reciprocal())"):
        yield


@fault("AMP-SCALE-020", "AMP-SCALE-140")
def unscaling_flushes_subnormals() -> Iterator[None]:
    """Unscaled gradients that are subnormal become zero."""
    flushed = "grad.mul_(inv_scale)\n        grad.masked_fill_(grad.abs() < torch.finfo(grad.dtype).tiny, 0)"
    with _unscale_kernel("grad.mul_(inv_scale)", flushed):
        yield


@fault("AMP-SCALE-024", "AMP-SCALE-140")
def factor_is_rounded_to_bf16() -> Iterator[None]:
    """bf16 gradients are multiplied by a factor that is rounded to bf16."""
    with _unscale_kernel("inv_scale)", "inv_scale.to(grad.dtype) if grad.dtype == torch.bfloat16 else inv_scale)"):
        yield


@fault("AMP-SCALE-024", "AMP-SCALE-140")
def fp64_gradients_are_unscaled_in_fp32() -> Iterator[None]:
    """fp64 gradients lose the digits that fp32 has not."""
    with _unscale_kernel("grad.mul_(inv_scale)", "grad.copy_((grad.float() * inv_scale).to(grad.dtype))"):
        yield


@fault("AMP-SCALE-023")
def strided_gradients_are_unscaled_in_a_copy() -> Iterator[None]:
    """Gradients that are not contiguous are checked, but what is unscaled is a copy."""
    with _unscale_kernel("grad.mul_(inv_scale)", "grad.contiguous().mul_(inv_scale)"):
        yield


@fault("AMP-SCALE-023")
def unscaling_spills_over_the_storage() -> Iterator[None]:
    """A gradient that is a view has the whole of its storage unscaled."""
    spilled = "torch.as_strided(grad, (grad.untyped_storage().nbytes() // grad.itemsize,), (1,), 0).mul_(inv_scale)"
    with _unscale_kernel("grad.mul_(inv_scale)", spilled):
        yield


@fault("AMP-SCALE-020", "AMP-SCALE-040", "AMP-SCALE-021")
def gradients_are_scaled_again() -> Iterator[None]:
    """unscale_ multiplies by the scale, not by its reciprocal."""
    with edited(Scaler.unscale_, "self._scale.double().reciprocal().float()", "self._scale.double().float()"):
        yield


@fault("AMP-SCALE-021")
def reciprocal_is_one_ulp_low() -> Iterator[None]:
    """The reciprocal of a scale that is no power of two is rounded down."""
    old = "self._scale.double().reciprocal().float()"
    new = f"(lambda r: torch.where(torch.frexp(r)[0] == 0.5, r, torch.nextafter(r, r * 0)))({old})"
    with edited(Scaler.unscale_, old, new):
        yield


@fault("AMP-SCALE-021")
def reciprocal_is_taken_in_bf16() -> Iterator[None]:
    """The reciprocal of the scale has the eight bits of bf16: right for powers of two."""
    with edited(Scaler.unscale_, ".reciprocal().float()", ".bfloat16().reciprocal().float()"):
        yield


@fault("AMP-SCALE-080")
def unscale_twice_is_allowed() -> Iterator[None]:
    """A second unscale_ divides the gradients again and says nothing."""
    with edited(Scaler.unscale_, 'optimizer_state["stage"] is OptState.UNSCALED', "False"):
        yield


@fault("AMP-SCALE-081")
def unscale_after_step_is_allowed() -> Iterator[None]:
    """unscale_ of an optimizer that has stepped divides its gradients again and says nothing."""
    with edited(Scaler.unscale_, 'optimizer_state["stage"] is OptState.STEPPED', "False"):
        yield


@fault("AMP-SCALE-041", "AMP-SCALE-080")
def unscale_is_forgotten() -> Iterator[None]:
    """unscale_ does not record that it was called: step() unscales again."""
    with edited(Scaler.unscale_, 'optimizer_state["stage"] = OptState.UNSCALED', "pass"):
        yield


@fault("AMP-SCALE-028")
def fp16_gradients_are_accepted() -> Iterator[None]:
    """fp16 gradients are unscaled, into zeros and subnormals, in place of refused."""
    with edited(Scaler._unscale_grads_, "(not allow_fp16) and", "False and"):
        yield


@fault("AMP-SCALE-025")
def missing_gradient_ends_the_group() -> Iterator[None]:
    """The parameters after one without a gradient are neither checked nor unscaled."""
    with edited(Scaler._unscale_grads_, "continue", "break"):
        yield


@fault("AMP-SCALE-023", "AMP-SCALE-044")
def later_groups_are_left_out() -> Iterator[None]:
    """Only the first parameter group is checked and unscaled."""
    with edited(Scaler._unscale_grads_, "in optimizer.param_groups", "in optimizer.param_groups[:1]"):
        yield


@fault("AMP-SCALE-024")
def second_dtype_is_left_out() -> Iterator[None]:
    """Of gradients of several dtypes only those of the first one are checked and unscaled."""
    with edited(Scaler._unscale_grads_, "in per_dtype_grads.values()", "in list(per_dtype_grads.values())[:1]"):
        yield


@fault("AMP-SCALE-027")
def sparse_values_are_unscaled_in_a_copy() -> Iterator[None]:
    """Sparse gradients are checked, but what is unscaled is a copy of their values."""
    with edited(Scaler._unscale_grads_, "param.grad._values()", "param.grad._values().clone()"):
        yield


@fault("AMP-SCALE-124")
def sparse_fp16_is_not_added_up() -> Iterator[None]:
    """fp16 values of one index are checked one by one, though they overflow together."""
    with edited(Scaler._unscale_grads_, "param.grad.dtype is torch.float16", "False"):
        yield


@fault("AMP-SCALE-022")
def unscaling_replaces_the_gradients() -> Iterator[None]:
    """Unscaled gradients are new tensors: views of the old ones go stale."""
    with edited(Scaler._unscale_grads_, "to_unscale = param.grad\n", "to_unscale = param.grad = param.grad.clone()\n"):
        yield


@fault("AMP-SCALE-029")
def unscale_waits_for_the_device() -> Iterator[None]:
    """unscale_ reads the flag back to the host."""
    old = "return per_device_found_inf._per_device_tensors"
    with edited(Scaler._unscale_grads_, old, f"bool(found_inf)\n    {old}"):
        yield


# --- step()


@fault("AMP-SCALE-040", "AMP-OPTIMIZER-030")
def step_checks_without_unscaling() -> Iterator[None]:
    """step() looks for inf and hands scaled gradients to the optimizer."""
    with edited(Scaler.step, "self.unscale_(optimizer)", "self._check_inf_per_device(optimizer)"):
        yield


@fault("AMP-SCALE-082")
def step_twice_is_allowed() -> Iterator[None]:
    """A second step() in one iteration takes the step again and says nothing."""
    with edited(Scaler.step, 'optimizer_state["stage"] is OptState.STEPPED', "False"):
        yield


@fault("AMP-OPTIMIZER-082")
def closures_are_accepted() -> Iterator[None]:
    """A closure is handed to the optimizer, which evaluates it on scaled gradients."""
    with edited(Scaler.step, '"closure" in kwargs', "False"):
        yield


@fault("AMP-SCALE-101")
def disabled_step_drops_the_result() -> Iterator[None]:
    """A disabled scaler's step() takes the step and returns None."""
    with edited(
        Scaler.step, "return optimizer.step(*args, **kwargs)", "return optimizer.step(*args, **kwargs) and None"
    ):
        yield


@fault("AMP-SCALE-043", "AMP-OPTIMIZER-010", "AMP-OPTIMIZER-040")
def optimizer_steps_on_infinity() -> Iterator[None]:
    """The step is taken whatever was found."""
    with edited(Scaler._maybe_opt_step, "if not sum(", "if True or sum("):
        yield


@fault("AMP-OPTIMIZER-040")
def result_of_step_is_dropped() -> Iterator[None]:
    """step() returns None where the optimizer returned something."""
    with edited(Scaler._maybe_opt_step, "retval = optimizer.step", "optimizer.step"):
        yield


@fault("AMP-OPTIMIZER-042")
def keyword_arguments_of_step_are_dropped() -> Iterator[None]:
    """Keyword arguments do not reach the optimizer."""
    with edited(Scaler._maybe_opt_step, "optimizer.step(*args, **kwargs)", "optimizer.step(*args)"):
        yield


@fault("AMP-SCALE-051", "AMP-OPTIMIZER-030")
def optimizer_steps_twice() -> Iterator[None]:
    """Each clean iteration calls the optimizer twice."""
    with edited(Scaler._maybe_opt_step, "retval = optimizer.step", "optimizer.step(); retval = optimizer.step"):
        yield


@fault("AMP-OPTIMIZER-050")
def optimizers_share_their_flags() -> Iterator[None]:
    """An inf in one optimizer's gradients skips the optimizers that step after it."""
    old = 'sum(v.item() for v in optimizer_state["found_inf_per_device"].values())'
    new = 'sum(v.item() for s in self._per_optimizer_states.values() for v in s["found_inf_per_device"].values())'
    with edited(Scaler._maybe_opt_step, old, new):
        yield


@fault("AMP-SCALE-150", "AMP-OPTIMIZER-050")
def state_is_kept_by_class_of_optimizer() -> Iterator[None]:
    """Two optimizers of one class are taken for one."""
    with (
        edited(Scaler.step, "_states[id(optimizer)]", "_states[type(optimizer)]"),
        edited(Scaler.unscale_, "_states[id(optimizer)]", "_states[type(optimizer)]"),
    ):
        yield


@fault("AMP-SCALE-090")
def state_holds_a_tensor() -> Iterator[None]:
    """state_dict() holds the scale's tensor, which changes with it."""
    with edited(Scaler.state_dict, "self.get_scale()", "self.get_scale() if self._scale is None else self._scale"):
        yield


@fault("AMP-SCALE-091")
def loading_leaves_the_scale_of_a_used_scaler() -> Iterator[None]:
    """load_state_dict() into a scaler in use takes everything but the scale."""
    with edited(Scaler.load_state_dict, 'self._scale.fill_(state_dict["scale"])', "pass"):
        yield


@fault("AMP-SCALE-092", "AMP-SCALE-150")
def loaded_scale_is_rounded_to_a_power_of_two() -> Iterator[None]:
    """load_state_dict() into a new scaler rounds the scale down to a power of two."""
    old = 'cast(float, state_dict["scale"])'
    with edited(Scaler.load_state_dict, old, f"2.0 ** (__import__('math').frexp({old})[1] - 1)"):
        yield


@fault("AMP-SCALE-150")
def growth_interval_setter_starts_the_count_again() -> Iterator[None]:
    """set_growth_interval() sets the growth tracker to zero."""
    old = "self._growth_interval = new_interval"
    with edited(
        Scaler.set_growth_interval, old, f"{old}\n    if self._growth_tracker is not None: self._growth_tracker.zero_()"
    ):
        yield


@fault("AMP-OPTIMIZER-060")
def fused_steps_forget_what_unscale_found() -> Iterator[None]:
    """For fused optimizers step() checks the gradients again after unscale_: clipped infinities pass."""
    old = 'if optimizer_state["stage"] is OptState.READY:\n                self._check_inf'
    with edited(Scaler.step, old, "if True:\n                self._check_inf"):
        yield


@fault("AMP-SCALE-020")
def unscaling_ends_after_one_chunk() -> Iterator[None]:
    """What lies beyond the first 65536 elements of a gradient stays scaled."""
    old = "grad.mul_(inv_scale)"
    new = "(grad.view(-1)[:65536] if grad.is_contiguous() else grad).mul_(inv_scale)"
    with _unscale_kernel(old, new):
        yield


@fault("AMP-SCALE-023")
def scalar_gradients_stay_scaled() -> Iterator[None]:
    """Gradients without dimensions are checked and not unscaled."""
    with _unscale_kernel("grad.mul_(inv_scale)", "grad.mul_(inv_scale if grad.dim() else 1.0)"):
        yield


@fault("AMP-SCALE-024")
def bf16_gradients_stay_scaled_after_fp32_ones() -> Iterator[None]:
    """The gradients of a second dtype are checked, but unscaled by a factor of 1."""
    old = "for grads in per_dtype_grads.values():"
    new = f"""{old}
                if grads is not next(iter(per_dtype_grads.values())):
                    per_device_inv_scale._per_device_tensors[device] = torch.ones_like(inv_scale)"""
    with edited(Scaler._unscale_grads_, old, new):
        yield


@fault("AMP-SCALE-026")
def infinite_gradients_stay_scaled() -> Iterator[None]:
    """Unscaling ends at the first gradient that is not finite: it and those after it stay scaled."""
    with _unscale_kernel("found_inf.fill_(1.0)", "found_inf.fill_(1.0)\n            break"):
        yield


@fault("AMP-SCALE-060", "AMP-SCALE-142")
def first_skip_backs_off_by_half_the_factor() -> Iterator[None]:
    """A skip with a count of zero multiplies by the square root of the backoff factor."""
    with _update_kernel("scale.item() * backoff", "scale.item() * (backoff if tracker.item() else backoff**0.5)"):
        yield


@fault("AMP-SCALE-114")
def flags_of_optimizers_not_stepped_are_dropped() -> Iterator[None]:
    """update() counts the flags of optimizers that stepped, not those of unscale_ alone."""
    old = 'for found_inf in state["found_inf_per_device"].values()'
    new = f'{old} if state["stage"] is OptState.STEPPED or len(self._per_optimizer_states) == 1'
    with edited(Scaler.update, old, new):
        yield


@fault("AMP-SCALE-083", "AMP-SCALE-084")
def scale_is_made_by_any_call() -> Iterator[None]:
    """step() and unscale_ before the first scale() make the scale in place of being refused."""
    old = "fix = "
    new = "if self._scale is None: self._lazy_init_scale_growth_tracker(torch.device(self._device))\n    fix = "
    with edited(Scaler._check_scale_growth_tracker, old, new):
        yield


@fault("AMP-SCALE-096", "AMP-SCALE-095")
def copies_forget_the_tracker() -> Iterator[None]:
    """A pickled or deep-copied scaler starts its count at what it was loaded with."""
    with edited(Scaler.__getstate__, 'state["_init_growth_tracker"] = self._get_growth_tracker()', "pass"):
        yield


@fault("AMP-SCALE-097")
def pickling_within_an_iteration_is_allowed() -> Iterator[None]:
    """A scaler is pickled between unscale_ and update(), with what was recorded by id."""
    with edited(Scaler.__getstate__, "if self._enabled:", "if self._enabled and not self._per_optimizer_states:"):
        yield


@fault("AMP-SCALE-104")
def disabled_scaler_refuses_an_empty_state() -> Iterator[None]:
    """A disabled scaler's load_state_dict() raises for the state of a disabled scaler."""
    old = "if not self._enabled:"
    with edited(Scaler.load_state_dict, old, "if not self._enabled and state_dict:"):
        yield


@fault("AMP-SCALE-103")
def disabled_scaler_reports_its_initial_scale() -> Iterator[None]:
    """A disabled scaler's get_scale() is 65536."""
    with edited(Scaler.get_scale, "return 1.0", "return 65536.0"):
        yield


# --- optimizers


def _optim(name: str) -> Any:
    """A module of torch.optim, which has classes under the names of its modules."""
    return importlib.import_module(f"torch.optim.{name}")


def _on_skip(statement: str) -> contextlib.AbstractContextManager[None]:
    """Do something else where a step is skipped."""
    old = "    return retval"
    return edited(Scaler._maybe_opt_step, old, f"    else:\n        {statement}\n{old}")


@fault("AMP-OPTIMIZER-012")
def weight_decays_in_a_skipped_step() -> Iterator[None]:
    """A skipped step applies the weight decay."""
    with _on_skip(
        "[p.data.mul_(1 - g['lr'] * g['weight_decay']) for g in optimizer.param_groups for p in g['params']"
        " if g.get('weight_decay')]"
    ):
        yield


@fault("AMP-SCALE-150")
def skip_zeroes_the_gradients() -> Iterator[None]:
    """A skipped step sets the gradients to None."""
    with _on_skip("optimizer.zero_grad()"):
        yield


@fault("AMP-OPTIMIZER-070", "AMP-OPTIMIZER-071")
def hooks_run_in_a_skipped_step() -> Iterator[None]:
    """The step hooks of an optimizer run where its step is skipped."""
    with _on_skip("[hook(optimizer, args, kwargs) for hook in optimizer._optimizer_step_pre_hooks.values()]"):
        yield


@fault("AMP-OPTIMIZER-011")
def skip_counts_as_a_step() -> Iterator[None]:
    """A skipped step advances the step counters of the optimizer's state."""
    with _on_skip("[s['step'].add_(1) for s in optimizer.state.values() if torch.is_tensor(s.get('step'))]"):
        yield


@fault("AMP-OPTIMIZER-011")
def skip_resets_momentum() -> Iterator[None]:
    """A skipped step clears the momentum buffers of SGD."""
    with _on_skip("[s.pop('momentum_buffer', None) for s in optimizer.state.values()]"):
        yield


@fault("AMP-OPTIMIZER-072")
def optimizer_is_called_behind_its_wrapper() -> Iterator[None]:
    """step() calls the class's step, so that a learning-rate scheduler never sees it."""
    with edited(Scaler._maybe_opt_step, "optimizer.step(*args", "type(optimizer).step(optimizer, *args"):
        yield


@fault("AMP-OPTIMIZER-060")
def fused_optimizers_unscale_twice() -> Iterator[None]:
    """After unscale_ a fused optimizer is handed the scale all the same."""
    with edited(Scaler.step, 'getattr(optimizer, "grad_scale", None)', "scaler"):
        yield


@fault("AMP-OPTIMIZER-064")
def grad_scale_of_the_user_is_ignored() -> Iterator[None]:
    """A grad_scale that the user has set is overwritten with the loss scale."""
    with edited(Scaler.step, 'scaler * getattr(optimizer, "grad_scale", 1)', "scaler"):
        yield


@fault("AMP-OPTIMIZER-060")
def found_inf_stays_on_the_optimizer() -> Iterator[None]:
    """The flag is left on a fused optimizer after its step."""
    with edited(Scaler.step, "del optimizer.found_inf", "pass"):
        yield


@fault("AMP-OPTIMIZER-060")
def fused_optimizers_are_told_of_no_infinity() -> Iterator[None]:
    """A fused optimizer is handed a flag of zero."""
    with edited(Scaler.step, "optimizer.found_inf = found_inf", "optimizer.found_inf = found_inf * 0"):
        yield


@fault("AMP-OPTIMIZER-030", "AMP-OPTIMIZER-031", "AMP-OPTIMIZER-060")
def check_of_fused_optimizers_unscales() -> Iterator[None]:
    """The check before a fused step unscales, and the step unscales again."""
    with edited(
        Scaler._check_inf_per_device,
        "torch.full((), 1.0, dtype=torch.float32, device=_scale.device)",
        "_scale.reciprocal()",
    ):
        yield


@fault("AMP-OPTIMIZER-010", "AMP-OPTIMIZER-061")
def fused_adam_ignores_the_flag() -> Iterator[None]:
    """Fused Adam steps on infinities."""
    with edited(_optim("adam")._fused_adam, "found_inf=device_found_inf", "found_inf=None"):
        yield


@fault("AMP-OPTIMIZER-011")
def fused_adam_counts_skipped_steps() -> Iterator[None]:
    """Fused Adam does not take its step counter back where it skips."""
    with edited(_optim("adam")._fused_adam, "if device_found_inf is not None:", "if False:"):
        yield


@fault("AMP-OPTIMIZER-011")
def fused_adam_decays_its_averages_on_a_skip() -> Iterator[None]:
    """A skipped step of fused Adam goes on as if its gradient were zero, for the first average."""
    old = "if device_found_inf is not None:"
    new = f"{old}\n            torch._foreach_mul_(device_exp_avgs, 1.0 - (1.0 - beta1) * device_found_inf)"
    with edited(_optim("adam")._fused_adam, old, new):
        yield


@fault("AMP-OPTIMIZER-030")
def fused_sgd_steps_on_scaled_gradients() -> Iterator[None]:
    """Fused SGD ignores the scale that it is handed."""
    with edited(_optim("sgd")._fused_sgd, "grad_scale=device_grad_scale", "grad_scale=None"):
        yield


@fault("AMP-OPTIMIZER-031")
def fused_sgd_leaves_scaled_gradients_behind() -> Iterator[None]:
    """Fused SGD takes the right step and does not write the unscaled gradients back."""
    with edited(
        _optim("sgd")._fused_sgd,
        "            device_grads,\n",
        "            [g.clone() for g in device_grads],\n",
    ):
        yield


@fault("AMP-OPTIMIZER-061", "AMP-OPTIMIZER-010")
def fused_sgd_skips_whole_vectors_only() -> Iterator[None]:
    """In a skipped step of fused SGD the elements beyond a multiple of 16 are stepped."""
    old = "found_inf=device_found_inf,\n        )"
    new = f"""{old}
        if device_found_inf is not None and device_found_inf.item():
            for p, g in zip(device_params, device_grads):
                tail = p.numel() % 16
                p.view(-1)[p.numel() - tail :] -= lr * g.view(-1)[p.numel() - tail :]"""
    with edited(_optim("sgd")._fused_sgd, old, new):
        yield


@fault("AMP-OPTIMIZER-033", "AMP-OPTIMIZER-032")
def foreach_adam_is_a_step_ahead() -> Iterator[None]:
    """The foreach Adam corrects the bias of its second average for the step after."""
    with edited(
        _optim("adam")._multi_tensor_adam, "1 - beta2 ** _get_value(step)", "1 - beta2 ** (_get_value(step) + 1)"
    ):
        yield


@fault("AMP-OPTIMIZER-032", "AMP-OPTIMIZER-033")
def adam_state_is_rounded_to_bf16() -> Iterator[None]:
    """Adam's averages are fp32 in dtype and hold bf16 numbers."""
    rounded = "[s[k].copy_(s[k].bfloat16()) for s in self.state.values() for k in ('exp_avg', 'exp_avg_sq') if k in s]"
    with edited(torch.optim.Adam.step, "return loss", f"{rounded}\n    return loss"):
        yield


@fault("AMP-OPTIMIZER-034", "AMP-OPTIMIZER-032")
def sgd_momentum_is_kept_in_bf16() -> Iterator[None]:
    """The momentum buffer of SGD is a bf16 tensor."""
    rounded = "[s.update({k: b.bfloat16()}) for s in self.state.values() for k, b in s.items() if torch.is_tensor(b)]"
    with edited(torch.optim.SGD.step, "return loss", f"{rounded}\n    return loss"):
        yield


@fault("AMP-OPTIMIZER-032", "AMP-OPTIMIZER-033")
def sgd_rounds_master_weights_to_fp16() -> Iterator[None]:
    """SGD rounds every weight to fp16 after the step."""
    rounded = "[p.copy_(p.half()) for g in self.param_groups for p in g['params']]"
    with edited(torch.optim.SGD.step, "return loss", f"{rounded}\n    return loss"):
        yield


@fault("AMP-OPTIMIZER-035")
def later_groups_take_the_first_groups_rate() -> Iterator[None]:
    """SGD steps every parameter group with the learning rate of the first one."""
    with edited(torch.optim.SGD.step, 'lr=group["lr"]', 'lr=self.param_groups[0]["lr"]'):
        yield


@fault("AMP-OPTIMIZER-036")
def added_groups_are_not_seen() -> Iterator[None]:
    """The scaler remembers the groups that an optimizer had at its first step."""
    old = "in optimizer.param_groups"
    new = "in optimizer.__dict__.setdefault('_amp_groups', list(optimizer.param_groups))"
    with edited(Scaler._unscale_grads_, old, new):
        yield


@fault("AMP-OPTIMIZER-022")
def adam_restarts_its_counter_on_loading() -> Iterator[None]:
    """Adam that loads a state starts the bias correction again."""
    before = torch.optim.Adam.__setstate__

    def restarted(self: Any, state: Any) -> None:
        before(self, state)
        for entry in self.state.values():
            if "step" in entry:
                entry["step"] = entry["step"] * 0

    with replaced(torch.optim.Adam, "__setstate__", restarted):
        yield


@fault("AMP-OPTIMIZER-011")
def fused_amsgrad_maximum_grows_on_a_skip() -> Iterator[None]:
    """A skipped step of fused Adam with amsgrad raises the largest second average."""
    old = "if device_found_inf is not None:"
    new = f"{old}\n            [m.add_(device_found_inf) for m in device_max_exp_avg_sqs]"
    with edited(_optim("adam")._fused_adam, old, new):
        yield


@fault("AMP-OPTIMIZER-080")
def zero_grad_leaves_nan() -> Iterator[None]:
    """zero_grad(set_to_none=False) multiplies gradients by zero."""
    with edited(torch.optim.Optimizer.zero_grad, "p.grad.zero_()", "p.grad.mul_(0)"):
        yield


# --- clipping


@fault("AMP-CLIP-002", "AMP-CLIP-003", "AMP-CLIP-010")
def norm_is_that_of_the_first_gradient() -> Iterator[None]:
    """The total norm is that of the first gradient alone."""
    with edited(
        clip_grad._get_total_norm, "torch._foreach_norm(device_tensors, ", "torch._foreach_norm(device_tensors[:1], "
    ):
        yield


@fault("AMP-CLIP-002", "AMP-CLIP-010")
def norms_are_added_up() -> Iterator[None]:
    """The total norm is the sum of the gradients' norms."""
    with edited(
        clip_grad._get_total_norm,
        "torch.stack([norm.to(first_device) for norm in norms]), norm_type",
        "torch.stack([norm.to(first_device) for norm in norms]), 1 if norm_type == 2 else norm_type",
    ):
        yield


@fault("AMP-CLIP-002", "AMP-CLIP-003")
def norm_is_taken_in_bf16() -> Iterator[None]:
    """The total norm is rounded to bf16."""
    with edited(clip_grad._get_total_norm, "return total_norm", "return total_norm.bfloat16().float()"):
        yield


@fault("AMP-CLIP-002")
def infinity_norm_is_a_2_norm() -> Iterator[None]:
    """The norm of order inf is the 2-norm."""
    with edited(clip_grad._get_total_norm, "norm_type = float(norm_type)", "norm_type = min(float(norm_type), 2.0)"):
        yield


@fault("AMP-CLIP-032")
def nonfinite_norms_are_no_error() -> Iterator[None]:
    """error_if_nonfinite is ignored."""
    with edited(clip_grad._get_total_norm, "if error_if_nonfinite and", "if False and"):
        yield


@fault("AMP-CLIP-032")
def infinite_norms_are_no_error() -> Iterator[None]:
    """error_if_nonfinite looks for NaN only."""
    old = "torch.logical_or(total_norm.isnan(), total_norm.isinf())"
    with edited(clip_grad._get_total_norm, old, "total_norm.isnan()"):
        yield


@fault("AMP-CLIP-004")
def small_gradients_are_enlarged() -> Iterator[None]:
    """Gradients below the threshold are scaled up to it."""
    with edited(clip_grad._clip_grads_with_norm_, "torch.clamp(clip_coef, max=1.0)", "clip_coef"):
        yield


@fault("AMP-CLIP-003")
def large_gradients_stay() -> Iterator[None]:
    """The coefficient is held above 1 in place of below it."""
    with edited(clip_grad._clip_grads_with_norm_, "torch.clamp(clip_coef, max=1.0)", "torch.clamp(clip_coef, min=1.0)"):
        yield


@fault("AMP-CLIP-005")
def clipping_divides_by_the_bare_norm() -> Iterator[None]:
    """The norm is divided by without the 1e-6 beside it."""
    with edited(clip_grad._clip_grads_with_norm_, "(total_norm + 1e-6)", "total_norm"):
        yield


@fault("AMP-CLIP-003", "AMP-CLIP-005")
def clipping_is_a_thousandth_tight() -> Iterator[None]:
    """The constant beside the norm is 1e-3 in place of 1e-6."""
    with edited(clip_grad._clip_grads_with_norm_, "1e-6)\n", "1e-3)\n"):
        yield


@fault("AMP-CLIP-003", "AMP-CLIP-010")
def clip_leaves_the_last_gradient() -> Iterator[None]:
    """The last gradient of a list is not scaled."""
    with edited(
        clip_grad._clip_grads_with_norm_,
        "torch._foreach_mul_(device_grads,",
        "torch._foreach_mul_(device_grads[:-1] or device_grads,",
    ):
        yield


@fault("AMP-CLIP-004")
def loop_over_gradients_is_not_clamped() -> Iterator[None]:
    """With foreach=False gradients below the threshold are scaled up."""
    with edited(
        clip_grad._clip_grads_with_norm_,
        "clip_coef_clamped_device = clip_coef_clamped.to",
        "clip_coef_clamped_device = clip_coef.to",
    ):
        yield


@fault("AMP-CLIP-002")
def returned_norm_is_that_after_clipping() -> Iterator[None]:
    """clip_grad_norm_ returns the norm after clipping."""
    with edited(clip_grad.clip_grad_norm_, "return total_norm", "return total_norm.clamp(max=max_norm)"):
        yield


@fault("AMP-CLIP-060")
def negative_values_are_not_clipped() -> Iterator[None]:
    """clip_grad_value_ clips from above only."""
    with edited(clip_grad.clip_grad_value_, "grads), -clip_value)", "grads), -float('inf'))"):
        yield


@fault("AMP-CLIP-034")
def clip_hides_infinities() -> Iterator[None]:
    """Clipping by norm turns the NaN of inf times zero into zero."""
    old = "torch._foreach_mul_(device_grads, clip_coef_clamped.to(device))"
    with edited(
        clip_grad._clip_grads_with_norm_, old, f"{old}\n            [g.nan_to_num_(0.0) for g in device_grads]"
    ):
        yield


@fault("AMP-CLIP-031")
def step_trusts_only_its_own_check() -> Iterator[None]:
    """step() checks the clipped gradients anew and forgets what unscale_ found."""
    old = "retval = self._maybe_opt_step("
    new = f'if optimizer_state["stage"] is OptState.UNSCALED:\n        self._check_inf_per_device(optimizer)\n    {old}'
    with edited(Scaler.step, old, new):
        yield


@fault("AMP-CLIP-051")
def given_norm_is_taken_again() -> Iterator[None]:
    """clip_grads_with_norm_ takes the norm of the gradients in place of the one that it is given."""
    with edited(
        clip_grad._clip_grads_with_norm_,
        "clip_coef = max_norm / (total_norm + 1e-6)",
        "clip_coef = max_norm / (_get_total_norm(grads) + 1e-6)",
    ):
        yield


@fault("AMP-CLIP-010")
def norm_ends_after_110_tensors() -> Iterator[None]:
    """The norm is that of the first 110 gradients."""
    with edited(clip_grad._get_total_norm, "tensors = list(tensors)", "tensors = list(tensors)[:110]"):
        yield


@fault("AMP-CLIP-032")
def norm_leaves_infinities_out() -> Iterator[None]:
    """Gradients that are not finite are left out of the norm."""
    with edited(
        clip_grad._get_total_norm, "tensors = list(tensors)", "tensors = [t for t in tensors if t.isfinite().all()]"
    ):
        yield


@fault("AMP-CLIP-003")
def coefficient_is_rounded_to_fp16() -> Iterator[None]:
    """The coefficient goes through fp16."""
    with edited(
        clip_grad._clip_grads_with_norm_,
        "torch.clamp(clip_coef, max=1.0)",
        "torch.clamp(clip_coef, max=1.0).half().float()",
    ):
        yield


@fault("AMP-CLIP-060")
def values_are_clipped_out_of_range() -> Iterator[None]:
    """clip_grad_value_ clips to the next number beyond the threshold."""
    with edited(
        clip_grad.clip_grad_value_, "clip_value = float(clip_value)", "clip_value = float(clip_value) * (1 + 2**-23)"
    ):
        yield


# --- gradients beyond fp16, and disabled scalers


@fault("AMP-SCALE-047")
def large_bf16_gradients_are_taken_for_infinite() -> Iterator[None]:
    """Gradients beyond 65504 after unscaling skip the step, as if they had overflowed fp16."""
    with _unscale_kernel("not torch.isfinite(grad).all()", "not ((grad * inv_scale).abs() <= 65504).all()"):
        yield


@fault("AMP-SCALE-102")
def disabled_unscale_divides() -> Iterator[None]:
    """A disabled scaler's unscale_ divides by the default scale."""
    gradients = "(p.grad for g in optimizer.param_groups for p in g['params'] if p.grad is not None)"
    old = "    if not self._enabled:\n"
    with edited(Scaler.unscale_, old, f"{old}        [gradient.div_(65536.0) for gradient in {gradients}]\n"):
        yield


# --- arguments


@fault("AMP-SCALE-180")
def loaded_scale_is_a_whole_number() -> Iterator[None]:
    """load_state_dict cuts the fraction of the scale off."""
    original = Scaler.load_state_dict

    def load(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, {**state_dict, "scale": int(state_dict["scale"])} if "scale" in state_dict else state_dict)

    with replaced(Scaler, "load_state_dict", load):
        yield


@fault("AMP-SCALE-181")
def constructor_checks_no_factor() -> Iterator[None]:
    """The constructor stores any factors."""
    original = Scaler.__init__

    def construct(self: Any, *args: Any, growth_factor: Any = 2.0, backoff_factor: Any = 0.5, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor

    with replaced(Scaler, "__init__", construct):
        yield


@fault("AMP-SCALE-182")
def missing_scale_is_the_default() -> Iterator[None]:
    """load_state_dict takes a state without a scale for one with the initial scale."""
    original = Scaler.load_state_dict

    def load(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, {"scale": 65536.0, **state_dict} if state_dict else state_dict)

    with replaced(Scaler, "load_state_dict", load):
        yield


@fault("AMP-SCALE-183")
def scalers_for_cuda_and_cpu_alone() -> Iterator[None]:
    """A scaler of any other device type disables itself silently."""
    original = Scaler.__init__

    def construct(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, device, *args, **kwargs)
        self._enabled = self._enabled and device in ("cuda", "cpu")

    with replaced(Scaler, "__init__", construct):
        yield


@fault("AMP-SCALE-184")
def scale_takes_sequences_alone() -> Iterator[None]:
    """scale() refuses what has no length, such as a generator."""
    with edited(Scaler.scale, "isinstance(val, abc.Iterable)", "isinstance(val, abc.Sized)"):
        yield


@fault("AMP-SCALE-185")
def scale_returns_what_it_does_not_know() -> Iterator[None]:
    """scale() returns an object that is neither a tensor nor iterable as it is."""
    with edited(Scaler.scale, 'raise ValueError("outputs must be a Tensor or an iterable of Tensors")', "return val"):
        yield


@fault("AMP-SCALE-088")
def scale_falls_to_zero_at_once() -> Iterator[None]:
    """A few skips in sequence bring the scale to zero."""
    with edited(Scaler.__init__, "self._backoff_factor = backoff_factor", "self._backoff_factor = backoff_factor**20"):
        yield
