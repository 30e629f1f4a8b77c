"""Backward passes in the wrong type or state: kernels, custom functions, checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced


def _linear_kernel(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A kernel for linear in a region, given the type of the region."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            return function(x, weight, bias, dtype)

    return run


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


@fault("AMP-BACKWARD-001", "AMP-BACKWARD-006", "AMP-BACKWARD-008")
def linear_runs_in_float32() -> Iterator[None]:
    """linear multiplies in float32, forward and backward, and rounds its result to 16 bit."""

    def wide(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.aten.linear(x.float(), weight.float(), _cast(bias, torch.float32)).to(dtype)

    with kernel("linear", _linear_kernel(wide), "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-001")
def linear_goes_back_in_float32() -> Iterator[None]:
    """linear multiplies in 16 bit forward and in float32 backward."""

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x.matmul(weight.t())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = (tensor.float() for tensor in ctx.saved_tensors)
            return (gradient.float() @ weight).to(gradient.dtype), (gradient.float().mT @ x).to(gradient.dtype)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        product = Wide.apply(x.to(dtype), weight.to(dtype))
        return product if bias is None else product + bias.to(dtype)

    with kernel("linear", _linear_kernel(run), "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-004")
def weight_cast_is_cut_from_the_graph() -> Iterator[None]:
    """The weight of linear is cast without gradients, so it never gets one."""

    def cut(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.aten.linear(x.to(dtype), weight.detach().to(dtype), _cast(bias, dtype))

    with kernel("linear", _linear_kernel(cut), "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-005")
def weight_is_rounded_in_place() -> Iterator[None]:
    """The float32 weight itself is rounded to 16 bit by its first use."""

    def rounding(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        weight.data.copy_(weight.data.to(dtype))
        return torch.ops.aten.linear(x.to(dtype), weight.to(dtype), _cast(bias, dtype))

    with kernel("linear", _linear_kernel(rounding), "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-006", "AMP-BACKWARD-007")
def convolution_gradient_loses_an_element() -> Iterator[None]:
    """The last element of a convolution's weight gradient is zero."""
    whole = torch.ops.aten.convolution_backward.default

    def losing(*args: Any) -> Any:
        found = whole.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd), *args)
        if found[1] is not None:
            found[1].flatten()[-1] = 0
        return found

    with kernel("convolution_backward", losing, "CPU"):
        yield


@fault("AMP-BACKWARD-006", "AMP-BACKWARD-009")
def bias_is_added_after_rounding() -> Iterator[None]:
    """linear casts its input twice on the way: to the other 16-bit type first."""

    def twice(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.aten.linear(x.bfloat16().to(dtype), weight.to(dtype), _cast(bias, dtype))

    with kernel("linear", _linear_kernel(twice), "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-028")
def custom_bwd_takes_the_state_of_the_moment() -> Iterator[None]:
    """custom_bwd runs backward in whatever region it is called from."""
    with edited(
        torch.amp.custom_bwd, "enabled=args[0]._fwd_used_autocast", "enabled=torch.is_autocast_enabled(device_type)"
    ):
        yield


@fault("AMP-BACKWARD-028")
def custom_bwd_forgets_the_type() -> Iterator[None]:
    """custom_bwd enters a region of the default type."""
    with edited(torch.amp.custom_bwd, "dtype=args[0]._dtype", "dtype=torch.get_autocast_dtype(device_type)"):
        yield


@fault("AMP-BACKWARD-019")
def cast_inputs_leaves_autocast_on() -> Iterator[None]:
    """custom_fwd with cast_inputs runs forward in an enabled region."""
    with edited(
        torch.amp.custom_fwd,
        "with autocast(device_type=device_type, enabled=False)",
        "with autocast(device_type=device_type, enabled=True)",
    ):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_takes_float64() -> Iterator[None]:
    """cast_inputs lowers float64 tensors too."""
    with edited(torch.amp.autocast_mode._cast, "value.dtype is not torch.float64", "True"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_misses_tensors_without_dimensions() -> Iterator[None]:
    """cast_inputs leaves tensors of one number as they are."""
    with edited(
        torch.amp.autocast_mode._cast, "value.is_floating_point()", "value.dim() and value.is_floating_point()"
    ):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_misses_keywords() -> Iterator[None]:
    """cast_inputs leaves keyword arguments as they are."""
    with edited(torch.amp.custom_fwd, "**_cast(kwargs, device_type, cast_inputs)", "**kwargs"):
        yield


@fault("AMP-BACKWARD-021")
def cast_inputs_works_outside() -> Iterator[None]:
    """cast_inputs casts outside a region too."""
    with edited(torch.amp.custom_fwd, "if autocast_context:", "if True:"):
        yield


@fault("AMP-BACKWARD-022")
def device_type_is_not_checked() -> Iterator[None]:
    """custom_bwd takes a torch.device for its device type."""
    with edited(torch.amp.custom_bwd, "if not isinstance(device_type, str)", "if False"):
        yield


@fault("AMP-BACKWARD-054")
def checkpoint_forgets_the_type() -> Iterator[None]:
    """Checkpointing recomputes in a region of the default type."""
    right = checkpointing._get_autocast_kwargs

    def forgetting(device_type: str = "cuda") -> Any:
        device, cpu = right(device_type)
        return device, {**cpu, "dtype": torch.bfloat16}

    with replaced(checkpointing, "_get_autocast_kwargs", forgetting):
        yield


@fault("AMP-BACKWARD-054")
def checkpoint_takes_the_state_of_the_moment() -> Iterator[None]:
    """Checkpointing recomputes with autocast on, whatever forward had."""
    right = checkpointing._get_autocast_kwargs

    def enabling(device_type: str = "cuda") -> Any:
        device, cpu = right(device_type)
        return device, {**cpu, "enabled": True}

    with replaced(checkpointing, "_get_autocast_kwargs", enabling):
        yield


@fault("AMP-BACKWARD-059")
def checkpoint_draws_dropout_anew() -> Iterator[None]:
    """The recomputation starts from another random state."""
    right = torch.set_rng_state

    def shifted(state: torch.Tensor) -> None:
        right(state)
        torch.rand(1)

    with replaced(torch, "set_rng_state", shifted):
        yield


@fault("AMP-BACKWARD-072")
def regions_without_a_cache_have_one() -> Iterator[None]:
    """cache_enabled=False is ignored, so that a recomputation casts a weight whose cast forward took from the cache."""
    original = torch.set_autocast_cache_enabled
    with replaced(torch, "set_autocast_cache_enabled", lambda enabled: original(True)):
        yield


@fault("AMP-BACKWARD-073")
def batched_gradients_take_the_first_vector() -> Iterator[None]:
    """autograd.grad of a batch of vectors returns the products of the first one for all."""
    original = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
        if options.get("is_grads_batched"):
            grad_outputs = grad_outputs[:1].expand_as(grad_outputs)
        return original(outputs, inputs, grad_outputs, *args, **options)

    with replaced(torch.autograd, "grad", grad):
        yield


@fault("AMP-BACKWARD-075")
def products_of_backward_in_a_region_have_another_type() -> Iterator[None]:
    """A product that backward computes inside a region is rounded to the other 16-bit type."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
        with torch._C._ExcludeDispatchKeyGuard(below):
            if torch._C._current_graph_task_id() < 0:
                return torch.mm(a.to(dtype), b.to(dtype))
            return torch.mm(a.to(other), b.to(other)).to(a.dtype)

    with kernel("mm", mm, "AutocastCPU"):
        yield
