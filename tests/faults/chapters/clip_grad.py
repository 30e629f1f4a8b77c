"""The clipping functions broken branch by branch, and what a scaler does for several devices and dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tests.faults import fault
from tests.faults.breaking import edited, replaced

SCALER = torch.amp.GradScaler
NORM, SHRINK = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
CLIP, VALUE = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_


# --- which implementation


@fault("AMP-CLIP-012")
def foreach_is_refused_everywhere() -> Iterator[None]:
    """get_total_norm finds no device with foreach kernels where they are asked for."""
    with edited(NORM, "foreach and _device_has_foreach_support(device)", "False"):
        yield


@fault("AMP-CLIP-012")
def loop_is_never_taken() -> Iterator[None]:
    """foreach=False takes the multi-tensor kernels for the norm."""
    with edited(NORM, "foreach is None and _has", "foreach is not True and _has"):
        yield


@fault("AMP-CLIP-012")
def foreach_is_not_handed_on() -> Iterator[None]:
    """clip_grad_norm_ shrinks by the implementation that torch chooses, whatever was asked for."""
    with edited(CLIP, "max_norm, total_norm, foreach)", "max_norm, total_norm)"):
        yield


@fault("AMP-CLIP-012")
def subclasses_meet_foreach_kernels() -> Iterator[None]:
    """Gradients of a tensor subclass are shrunk by multi-tensor kernels unasked."""
    with edited(SHRINK, "_has_foreach_support(device_grads, device)", "_device_has_foreach_support(device)"):
        yield


@fault("AMP-CLIP-012")
def values_are_always_looped() -> Iterator[None]:
    """clip_grad_value_ chooses the loop by itself."""
    with edited(VALUE, "foreach is None\n            and", "False\n            and"):
        yield


@fault("AMP-CLIP-013")
def fallback_is_an_error() -> Iterator[None]:
    """On a device without foreach kernels foreach=None is refused."""
    with edited(NORM, "elif foreach:", "elif foreach is not False:"):
        yield


@fault("AMP-CLIP-014")
def devices_are_not_asked() -> Iterator[None]:
    """foreach=True runs multi-tensor kernels on any device."""
    with edited(SHRINK, "foreach and _device_has_foreach_support(device)", "foreach"):
        yield


@fault("AMP-CLIP-014")
def refusal_of_foreach_is_lost() -> Iterator[None]:
    """clip_grad_value_ makes the error of foreach=True and does not raise it."""
    with edited(VALUE, "raise RuntimeError(", "RuntimeError("):
        yield


# --- arguments


@fault("AMP-CLIP-015")
def wrapper_hides_the_signature() -> Iterator[None]:
    """clip_grad_norm_ is wrapped without its signature."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return CLIP(*args, **kwargs)

    with replaced(torch.nn.utils, "clip_grad_norm_", wrapper):
        yield


@fault("AMP-CLIP-015", "AMP-CLIP-052")
def default_norm_is_the_1_norm() -> Iterator[None]:
    """get_total_norm takes the 1-norm by default."""
    function = inspect.unwrap(NORM)
    before = function.__defaults__
    function.__defaults__ = (1.0, False, None)
    try:
        yield
    finally:
        function.__defaults__ = before


@fault("AMP-CLIP-016")
def thresholds_keep_their_type() -> Iterator[None]:
    """max_norm enters the arithmetic as it is."""
    with edited(SHRINK, "max_norm = float(max_norm)", "max_norm = max_norm"):
        yield


@fault("AMP-CLIP-016")
def values_keep_their_type() -> Iterator[None]:
    """clip_value enters the kernels as it is."""
    with edited(VALUE, "clip_value = float(clip_value)", "clip_value = clip_value"):
        yield


@fault("AMP-CLIP-017")
def norm_types_keep_their_type() -> Iterator[None]:
    """norm_type reaches the kernels as it is, 'inf' too."""
    with edited(NORM, "norm_type = float(norm_type)", "norm_type = norm_type"):
        yield


@fault("AMP-CLIP-018")
def unknown_norms_are_2_norms() -> Iterator[None]:
    """A name that is no number is taken for the 2-norm."""
    named = "isinstance(norm_type, str) and 'inf' not in norm_type.lower()"
    with edited(NORM, "norm_type = float(norm_type)", f"norm_type = 2.0 if {named} else float(norm_type)"):
        yield


@fault("AMP-CLIP-019")
def empty_generators_are_silent() -> Iterator[None]:
    """An empty generator of parameters passes without a warning."""
    with edited(CLIP, "if is_generator and len(parameters) == 0:", "if False:"):
        yield


@fault("AMP-CLIP-019")
def warning_names_torch_itself() -> Iterator[None]:
    """The warning of an empty generator names a line of torch."""
    with edited(CLIP, "stacklevel=3", "stacklevel=2"):
        yield


@fault("AMP-CLIP-019")
def empty_lists_warn() -> Iterator[None]:
    """An empty list warns as an empty generator does."""
    with edited(CLIP, "if is_generator and len", "if len"):
        yield


@fault("AMP-CLIP-081")
def old_spelling_takes_the_2_norm() -> Iterator[None]:
    """clip_grad_norm does not hand norm_type on."""
    with edited(clip_grad.clip_grad_norm, "max_norm, norm_type, error", "max_norm, 2.0, error"):
        yield


# --- norms


@fault("AMP-CLIP-035")
def elements_are_judged() -> Iterator[None]:
    """error_if_nonfinite looks for inf and NaN in the gradients, not in their norm."""
    old = "torch.logical_or(total_norm.isnan(), total_norm.isinf())"
    with edited(NORM, old, "any(not bool(each.isfinite().all()) for each in tensors)"):
        yield


@fault("AMP-CLIP-036")
def refusal_names_no_order() -> Iterator[None]:
    """The refusal of a non-finite norm does not say which norm it is."""
    with edited(NORM, "The total norm of order {norm_type} for", "The total norm for"):
        yield


@fault("AMP-CLIP-043")
def memory_is_clipped_for_the_view() -> Iterator[None]:
    """The loop multiplies the memory that a strided gradient is a view of."""
    whole = "(g if g.is_contiguous() or g._base is None else g._base)"
    with edited(SHRINK, "g.mul_(clip_coef_clamped_device)", f"{whole}.mul_(clip_coef_clamped_device)"):
        yield


@fault("AMP-CLIP-044")
def norm_ends_with_the_first_chunk() -> Iterator[None]:
    """The loop's norm leaves out what comes after the first 65536 elements."""
    with edited(NORM, "vector_norm(g, norm_type)", "vector_norm(g.flatten()[:65536], norm_type)"):
        yield


@fault("AMP-CLIP-044")
def tensors_end_with_the_first_thousand() -> Iterator[None]:
    """Gradients after the first thousand are not shrunk by the multi-tensor kernels."""
    with edited(SHRINK, "torch._foreach_mul_(device_grads,", "torch._foreach_mul_(device_grads[:1000],"):
        yield


@fault("AMP-CLIP-045")
def norm_saturates() -> Iterator[None]:
    """Norms beyond 2**64 are taken for 2**64."""
    with edited(NORM, "return total_norm", "return total_norm.clamp(max=2.0**64)"):
        yield


@fault("AMP-CLIP-045")
def small_norms_are_flushed() -> Iterator[None]:
    """Norms below 2**-58 are taken for zero."""
    with edited(NORM, "return total_norm", "return total_norm * (total_norm >= 2.0**-58)"):
        yield


@fault("AMP-CLIP-046")
def double_norms_are_rounded_to_single() -> Iterator[None]:
    """The norm of fp64 gradients comes in fp32."""
    with edited(NORM, "return total_norm", "return total_norm.float()"):
        yield


@fault("AMP-CLIP-047")
def norm_is_left_on_the_last_device() -> Iterator[None]:
    """The norm lies on the device of the last gradient."""
    with edited(NORM, "tensors[0].device", "tensors[-1].device"):
        yield


@fault("AMP-CLIP-047")
def coefficient_stays_where_the_norm_is() -> Iterator[None]:
    """The coefficient is not sent to the device of the gradients that the loop shrinks."""
    old = "clip_coef_clamped_device = clip_coef_clamped.to(device)"
    with edited(SHRINK, old, "clip_coef_clamped_device = clip_coef_clamped"):
        yield


@fault("AMP-CLIP-048")
def empty_gradients_make_nan() -> Iterator[None]:
    """The norm of a tensor without elements is NaN in the loop."""
    old = "torch.linalg.vector_norm(g, norm_type) for g"
    with edited(
        NORM, old, "torch.linalg.vector_norm(g, norm_type) / min(g.numel(), 1.0) if g.numel() else g.sum() / 0 for g"
    ):
        yield


@fault("AMP-CLIP-055")
def zero_is_no_threshold() -> Iterator[None]:
    """clip_grad_value_ takes a threshold of 0 for none."""
    with edited(VALUE, "clip_value = float(clip_value)", "clip_value = float(clip_value) or float('inf')"):
        yield


@fault("AMP-CLIP-057")
def sign_of_the_order_is_lost() -> Iterator[None]:
    """Orders below zero are taken for those above."""
    with edited(NORM, "norm_type = float(norm_type)", "norm_type = abs(float(norm_type))"):
        yield


@fault("AMP-CLIP-058")
def orders_are_rounded() -> Iterator[None]:
    """A norm of order 2.5 is one of order 2."""
    rounded = (
        "float(norm_type) if float(norm_type) in (0.5, float('inf'), -float('inf')) else float(round(float(norm_type)))"
    )
    with edited(NORM, "norm_type = float(norm_type)", f"norm_type = {rounded}"):
        yield


@fault("AMP-CLIP-090")
def norm_of_six_tensors_loses_one() -> Iterator[None]:
    """A list of exactly six gradients has the norm of five."""
    with edited(
        NORM, "tensors = list(tensors)", "tensors = (lambda all_: all_[:-1] if len(all_) == 6 else all_)(list(tensors))"
    ):
        yield


# --- what is clipped


@fault("AMP-CLIP-042")
def modules_repeat_shared_parameters() -> Iterator[None]:
    """Module.parameters yields a shared parameter once for each module that has it."""

    def parameters(self: torch.nn.Module, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        for module in self.modules() if recurse else [self]:
            yield from (each for each in module._parameters.values() if each is not None)

    with replaced(torch.nn.Module, "parameters", parameters):
        yield


@fault("AMP-CLIP-052")
def a_single_tensor_is_iterated() -> Iterator[None]:
    """get_total_norm runs over the first dimension of one tensor."""
    with edited(NORM, "isinstance(tensors, torch.Tensor)", "False"):
        yield


@fault("AMP-CLIP-053")
def a_single_parameter_is_iterated() -> Iterator[None]:
    """clip_grads_with_norm_ runs over the rows of one parameter, which have no gradient."""
    with edited(SHRINK, "isinstance(parameters, torch.Tensor)", "False"):
        yield


@fault("AMP-CLIP-054")
def clipping_by_value_is_recorded() -> Iterator[None]:
    """clip_grad_value_ runs with grad mode on."""
    with replaced(torch.nn.utils, "clip_grad_value_", inspect.unwrap(VALUE)):
        yield


@fault("AMP-CLIP-054")
def norm_requires_grad() -> Iterator[None]:
    """get_total_norm runs with grad mode on."""
    with replaced(torch.nn.utils, "get_total_norm", inspect.unwrap(NORM)):
        yield


@fault("AMP-CLIP-062")
def values_of_one_dtype_are_clipped() -> Iterator[None]:
    """clip_grad_value_ ends with the first group of gradients."""
    with edited(VALUE, "in grouped_grads.items():", "in list(grouped_grads.items())[:1]:"):
        yield


@fault("AMP-CLIP-023", "AMP-CLIP-024", "AMP-CLIP-025")
def scale_of_four_is_not_applied() -> Iterator[None]:
    """The loss is not scaled where the scale is below 8."""
    with edited(
        SCALER.scale, "# Short-circuit for the common case.", "if self._init_scale < 8: self._init_scale = 1.0"
    ):
        yield


@fault("AMP-CLIP-024")
def scaled_norm_is_never_beyond_a_million() -> Iterator[None]:
    """clip_grad_norm_ clips by a norm of at most 2**20."""
    with edited(CLIP, "max_norm, total_norm, foreach)", "max_norm, total_norm.clamp(max=2.0**20), foreach)"):
        yield


@fault("AMP-CLIP-025")
def values_beyond_a_million_escape() -> Iterator[None]:
    """clip_grad_value_ does nothing where the threshold is 1000 or more, as if it were inf."""
    with edited(
        VALUE, "clip_value = float(clip_value)", "clip_value = float(clip_value) if clip_value < 1000 else float('inf')"
    ):
        yield


# --- several devices and dtypes


@fault("AMP-SCALE-164")
def cached_casts_are_captured() -> Iterator[None]:
    """make_graphed_callables takes an autocast region with the cache on."""
    old = "if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():"
    with edited(torch.cuda.make_graphed_callables, old, "if False:"):
        yield


@fault("AMP-SCALE-166")
def first_device_decides() -> Iterator[None]:
    """step() reads the flag of the first device only."""
    old = 'sum(v.item() for v in optimizer_state["found_inf_per_device"].values())'
    with edited(SCALER._maybe_opt_step, old, 'next(iter(optimizer_state["found_inf_per_device"].values())).item()'):
        yield


@fault("AMP-SCALE-166")
def update_forgets_the_other_devices() -> Iterator[None]:
    """update() takes the flag of the first device for all."""
    with edited(SCALER.update, "if len(found_infs) > 1:", "if False:"):
        yield


@fault("AMP-SCALE-166")
def fused_optimizers_see_one_device() -> Iterator[None]:
    """An optimizer that skips by itself is handed the flag of the first device."""
    old = 'for t in optimizer_state["found_inf_per_device"].values()'
    with edited(SCALER.step, old, 'for t in list(optimizer_state["found_inf_per_device"].values())[:1]'):
        yield


@fault("AMP-SCALE-166")
def factor_stays_on_the_scales_device() -> Iterator[None]:
    """Every device is handed the factor that lives on the scale's."""
    with edited(SCALER._unscale_grads_, "per_device_inv_scale.get(device),", "inv_scale,"):
        yield


@fault("AMP-SCALE-167", "AMP-SCALE-168")
def copies_are_not_kept() -> Iterator[None]:
    """Each group of gradients is sent a flag and a factor of its own, and only the last flag is kept."""
    replicator = torch.amp.grad_scaler._MultiDeviceReplicator
    with edited(replicator.get, "self._per_device_tensors.get(device, None)", "None"):
        yield


@fault("AMP-SCALE-168")
def next_dtype_clears_the_flag() -> Iterator[None]:
    """The flag is cleared before each dtype's gradients are checked."""
    with edited(
        SCALER._unscale_grads_, "per_device_found_inf.get(device),", "per_device_found_inf.get(device).zero_(),"
    ):
        yield


@fault("AMP-OPTIMIZER-093")
def fused_kernel_of_the_first_dtype_is_told() -> Iterator[None]:
    """The fused Adam kernel skips fp32 parameters for an inf, and steps fp64 ones."""
    original = torch._fused_adam_

    def told(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if parameters[0].dtype is torch.float64:
            kwargs["found_inf"] = None
        return original(parameters, *args, **kwargs)

    with replaced(torch, "_fused_adam_", told):
        yield


@fault("AMP-CLIP-059")
def sparse_gradients_are_passed_over() -> Iterator[None]:
    """clip_grad_norm_ leaves sparse gradients out."""
    old = "for p in parameters if p.grad is not None]"
    new = "for p in parameters if p.grad is not None and not p.grad.is_sparse]"
    with edited(CLIP, old, new), edited(SHRINK, old, new):
        yield


@fault("AMP-CLIP-016")
def thresholds_of_other_types_are_rounded() -> Iterator[None]:
    """clip_grad_value_ rounds a threshold that is no float to a whole number."""
    old = "clip_value = float(clip_value)"
    with edited(VALUE, old, f"{old} if isinstance(clip_value, float) else float(round(float(clip_value)))"):
        yield


def _with_norm(change: Any) -> Any:
    """Change the total norm that clip_grad_norm_ computes: `change(norm, gradients, norm_type)`."""
    plain = clip_grad._get_total_norm

    def norm(tensors: Any, norm_type: float = 2.0, *args: Any, **options: Any) -> torch.Tensor:
        every = list(tensors)
        return change(plain(every, norm_type, *args, **options), every, norm_type)

    return replaced(clip_grad, "_get_total_norm", norm)


@fault("AMP-CLIP-095")
def norm_stops_at_the_root_of_its_range() -> Iterator[None]:
    """The norm is computed as if squares had to fit into float32, of whatever type it is."""
    with _with_norm(lambda norm, tensors, norm_type: norm.clamp(max=2.0**63)):
        yield


@fault("AMP-CLIP-096")
def norms_of_many_parts_are_added_in_16_bits() -> Iterator[None]:
    """The squares of the norms of 16-bit gradients are added one after the other in their type."""

    def added(norm: torch.Tensor, tensors: Any, norm_type: float) -> torch.Tensor:
        if norm.dtype not in (torch.float16, torch.bfloat16) or norm_type != 2.0 or len(tensors) < 100:
            return norm
        total = torch.zeros_like(norm)
        for one in tensors:
            total += torch.linalg.vector_norm(one) ** 2
        return total.sqrt()

    with _with_norm(added):
        yield


@fault("AMP-CLIP-097")
def largest_norm_is_squared_in_16_bits() -> Iterator[None]:
    """The inf-norm of 16-bit gradients is taken as the root of a square in their type, which overflows."""

    def squared(norm: torch.Tensor, tensors: Any, norm_type: float) -> torch.Tensor:
        low = norm.dtype in (torch.float16, torch.bfloat16)
        return (norm * norm).sqrt() if low and norm_type == float("inf") else norm

    with _with_norm(squared):
        yield
